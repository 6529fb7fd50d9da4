// LatentRing: the shared-memory pipeline that brings a block's tiles of latent rows from the paged pool to its consumer
// warps.
//
// Four producer warps fill it, each 16 tokens of every tile. The first one walks the block's segments (stream-K, or
// whole items) and publishes them to the others and to the consumers. 16 tokens that lie on one page and that some
// query row surely attends to (in the prefix, or a chain) come by TMA, three boxes for the three parts of a tile;
// others by cp.async, 16 bytes at a time, with zeros for tokens that no query row attends to. Rows of 8 bits pass
// through the producers' registers, which dequantize them (raw_tokens.cuh). Each part of a stage has barriers of its
// own: its readers release it as soon as they can, and the next tile's part is copied meanwhile.
//
// Reads: page table, pool, mask. Writes: shared memory, and status for invalid pages.
#pragma once

#include "attention/common/stream_k.cuh"
#include "core/mbarrier.cuh"
#include "core/wgmma.cuh"
#include "mla/sm90/raw_tokens.cuh"
#include "mla/sm90/slim.cuh"

namespace specdec::mla {

using attention::DevicePlan;
using attention::Segment;
using attention::Span;

// Warps 0 to kConsumers - 1 of the block consume, the next kProducers produce. kPartReaders warps read each part last.
// T: type of the tiles' elements. Row: that of the pool's, or Row656. kSlim: see slim.cuh.
template <class T, class Row, bool kSlim>
struct LatentRing {
  static constexpr int kStages = 2, kSegments = 2, kConsumers = 8, kProducers = 4, kPartReaders = 4;
  static constexpr int kTokens = LatentTile::kTokens, kMyTokens = kTokens / kProducers;
  static_assert(kMyTokens == kBoxTokens);
  static constexpr bool kDequantize = !std::is_same_v<T, Row>;
  // Return the arrivals of each producer for a part. A part that is copied has one of each lane's copies, too.
  static constexpr int arrivals(int part) { return kDequantize && RawTokens<T, Row>::has(part) ? 1 : kWarp + 1; }

  alignas(1024) LatentTile stages[kStages];

  // Barriers and what is published with them, apart from the stages so that those begin at multiples of 1024 bytes.
  struct Control {
    // Bit j of word w: token 16 w + j is on a valid page and visible to some query row. Published with kRotated.
    alignas(8) uint16_t present[kStages][kProducers];
    Segment segments[kSegments];
    Mbarrier full[kStages][LatentTile::kParts], empty[kStages][LatentTile::kParts];
    Mbarrier segment_full[kSegments], segment_empty[kSegments];

    // Initialize the barriers. Call from one thread, before the block's first __syncthreads().
    __device__ void init() {
      for (int s = 0; s < kStages; ++s)
        for (int part = 0; part < LatentTile::kParts; ++part) {
          full[s][part].init(arrivals(part) * kProducers);
          empty[s][part].init(kPartReaders);
        }
      for (int s = 0; s < kSegments; ++s) {
        segment_full[s].init(1);
        segment_empty[s].init(kConsumers + kProducers);
      }
    }
  };

  // Walk of the general form: whole items, or shares.
  class GeneralWalk {
   public:
    __device__ GeneralWalk() { asm volatile("" ::"l"(&shares_) : "memory"); }  // keeps it in memory between steps
    __device__ __forceinline__ Segment next_segment(const MlaTreeAttentionParams& p, const DevicePlan& plan,
                                                    int worker) {
      if (plan.whole_items) return whole_items_.next_segment(p, plan, worker);
      attention::StreamK<false> stream_k(p, plan, shares_, cached_requests_);
      const Segment s = stream_k.next_segment(worker);
      shares_ = stream_k;
      return s;
    }

   private:
    attention::StreamKState shares_;
    attention::WholeItems whole_items_;
    attention::CachedRequests cached_requests_;
  };
  using Walk = std::conditional_t<kSlim, SlimWalk, GeneralWalk>;

  // Run a producer warp from start to end.
  __device__ void produce(Control& control, const MlaTreeAttentionParams& p, const DevicePlan& plan, int worker,
                          const LatentMaps& maps) {
    const int producer = threadIdx.x / kWarp - kConsumers;
    Walk walk;
    Turn<kSegments> turn;
    Turn<kStages> stage;
#pragma unroll 1
    while (true) {
      if (producer == 0) {
        const Segment mine = walk.next_segment(p, plan, worker);
        if (threadIdx.x % kWarp == 0) {
          control.segment_empty[turn.at].wait(turn.parity ^ 1);
          control.segments[turn.at] = mine;
          control.segment_full[turn.at].arrive();
        }
        __syncwarp();
      }
      control.segment_full[turn.at].wait(turn.parity);
      const Segment& s = control.segments[turn.at];
      if (s.kv_head < 0) return;
      if (!s.merge) {
        if constexpr (kDequantize)
          dequantize_segment(control, p, plan, s, producer, stage);
        else
          copy_segment(control, p, plan, s, producer, stage, maps);
      }
      __syncwarp();
      if (threadIdx.x % kWarp == 0) control.segment_empty[turn.at].arrive();
      turn.advance();
    }
  }

 private:
  // Copy this producer's tokens of all tiles of a segment.
  __device__ __forceinline__ void copy_segment(Control& control, const MlaTreeAttentionParams& p,
                                               const DevicePlan& plan, const Segment& s, int producer,
                                               Turn<kStages>& stage, const LatentMaps& maps) {
    const int lane = hold(threadIdx.x % kWarp), my_first = producer * kMyTokens;
    // Pages before the range may have been freed.
    const Span range{visible_begin(p, s.request, plan.gqa_group.div(s.first_row)), s.request.end};
    // Tokens [range.begin, sure_end) are visible to some row. In a tree some tail tokens may be unwritten.
    const int sure_end = p.mask ? s.request.prefix : s.request.end;
    int page = lookup_page(p, plan, s, range, s.first_tile * kTokens + my_first + lane % kMyTokens);
#pragma unroll 1
    for (int tile = s.first_tile; tile < s.end_tile; ++tile, stage.advance()) {
      const int first = tile * kTokens + my_first, now = page;
      // Looked up a tile ahead, so that the load is in flight while this tile is copied.
      if (tile + 1 < s.end_tile) page = lookup_page(p, plan, s, range, first + kTokens + lane % kMyTokens);
      const bool sure = maps.usable && first >= range.begin && first + kMyTokens <= sure_end;
      if (sure && __all_sync(kFullMask, now >= 0 && now < p.rows.num_pages))
        copy_boxes(control, maps, stage, producer, plan.page_size.rem(first), now);
      else
        copy_rows(control, p, plan, s, range, stage, producer, first, now);
    }
  }

  // Return the page table entry of a token, or -1 outside the range, which does not exceed the table.
  __device__ static int lookup_page(const MlaTreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                    Span range, int token) {
    if (token < range.begin || token >= range.end) return -1;
    return __ldg(p.rows.page_table + s.request.slot * p.rows.max_pages + plan.page_size.div(token));
  }

  // Copy 16 tokens of a page by TMA. Rotated columns first: their place is free first.
  __device__ __forceinline__ void copy_boxes(Control& control, const LatentMaps& maps, Turn<kStages> stage,
                                             int producer, int offset_in_page, int page) {
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int n = 0; n < LatentTile::kParts; ++n) {
        constexpr int kOrder[] = {LatentTile::kRotated, LatentTile::kLeft, LatentTile::kRight};
        const int part = kOrder[n];
        Mbarrier& full = control.full[stage.at][part];
        control.empty[stage.at][part].wait(stage.parity ^ 1);  // passes at once in the first round
        if (part == LatentTile::kRotated) control.present[stage.at][producer] = 0xffff;
        full.arrive_expecting(arrivals(part), kMyTokens * 128 * LatentTile::panels(part));
        unsigned char* const to = place(stage.at, part, producer);
        const CUtensorMap& map = part == LatentTile::kRotated ? maps.narrow : maps.wide;
        const int panel = LatentTile::first_panel(part), group = offset_in_page / LatentTile::kGroupTokens;
        full.copy_box(to, &map, 0, 0, panel, group, page);
      }
    }
    __syncwarp();
  }

  // Copy 16 tokens row by row; lane l % 16 has the page table entry of token `first` + l % 16.
  __device__ __forceinline__ void copy_rows(Control& control, const MlaTreeAttentionParams& p, const DevicePlan& plan,
                                            const Segment& s, Span range, Turn<kStages> stage, int producer, int first,
                                            int page) {
    const Tokens tokens = find_tokens(p, plan, s, range, first, page);
    copy_part<LatentTile::kRotated>(control, p, stage, producer, tokens);
    copy_part<LatentTile::kLeft>(control, p, stage, producer, tokens);
    copy_part<LatentTile::kRight>(control, p, stage, producer, tokens);
  }

  // Find 16 tokens from `first` on, given their page table entries. Tokens that are not present become zeros: stale
  // data must not be read even with weight 0.
  __device__ __forceinline__ static Tokens find_tokens(const MlaTreeAttentionParams& p, const DevicePlan& plan,
                                                       const Segment& s, Span range, int first, int page) {
    const int lane = threadIdx.x % kWarp, token = first + lane % kMyTokens;
    bool is_present = page >= 0 && page < p.rows.num_pages;
    if (!is_present && token >= range.begin && token < range.end) set_status(p.status, s.request.slot, kBadPage);
    // A token that no row of the request attends to may never have been written, so it is not read.
    if (p.mask != nullptr && first + kMyTokens > s.request.prefix) {
      uint32_t visible = 0;
#pragma unroll 1
      for (int i = lane; i < s.request.valid_rows; i += kWarp)
        visible |= static_cast<uint32_t>(visible_word(p, s.request, i, first));
      is_present &= __reduce_or_sync(kFullMask, visible) >> lane % kMyTokens & 1;
    }
    const int64_t byte = page * p.page_stride + plan.page_size.rem(token) * p.row_stride;
    return {.start = is_present ? static_cast<uint32_t>(byte / 16) : 0,
            .present = __ballot_sync(kFullMask, is_present) & 0xffff};
  }

  template <int kPart>
  __device__ __forceinline__ void copy_part(Control& control, const MlaTreeAttentionParams& p, Turn<kStages> stage,
                                            int producer, Tokens tokens) {
    constexpr int kPieces = 8 * LatentTile::panels(kPart), kRowsPerStep = kWarp / kPieces;
    const int lane = threadIdx.x % kWarp, my_row = lane / kPieces, piece = lane % kPieces;
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(place(stage.at, kPart, producer))) +
                        piece / 8 * LatentTile::kPanelBytes;
    constexpr int kBegin =
        std::is_same_v<Row, Row656> ? Row656::kRopeBytes : LatentTile::first_panel(kPart) * 128;  // in a row
    const char* const pool = p.kv_pool + kBegin + piece * 16;
    control.empty[stage.at][kPart].wait(stage.parity ^ 1);
#pragma unroll
    for (int n = 0; n < kMyTokens; n += kRowsPerStep) {
      const int row = n + my_row, in_group = row % LatentTile::kGroupTokens;
      const uint32_t there = to + row / LatentTile::kGroupTokens * LatentTile::group_bytes(kPart) + in_group * 128 +
                             (piece % 8 ^ in_group) * 16;
      const char* const from = pool + __shfl_sync(kFullMask, tokens.start, row) * int64_t{16};
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(there), "l"(from),
                   "r"(tokens.present >> row & 1 ? 16 : 0)
                   : "memory");
    }
    control.full[stage.at][kPart].arrive_after_copies();
    if (lane == 0) {
      if (kPart == LatentTile::kRotated) control.present[stage.at][producer] = static_cast<uint16_t>(tokens.present);
      control.full[stage.at][kPart].arrive();
    }
  }

  // Copy and dequantize this producer's tokens of all tiles of a segment.
  __device__ __forceinline__ void dequantize_segment(Control& control, const MlaTreeAttentionParams& p,
                                                     const DevicePlan& plan, const Segment& s, int producer,
                                                     Turn<kStages>& stage) {
    using Raw = RawTokens<T, Row>;
    const int lane = hold(threadIdx.x % kWarp), my_first = producer * kMyTokens + lane % kMyTokens;
    const Span range{visible_begin(p, s.request, plan.gqa_group.div(s.first_row)), s.request.end};
    int page = lookup_page(p, plan, s, range, s.first_tile * kTokens + my_first);
    Tokens next{};
#pragma unroll 1
    for (int tile = s.first_tile - 1; tile < s.end_tile; ++tile) {
      // Found a tile ahead, so that its page table entries and masks are being loaded while this one is dequantized.
      const Tokens now = next;
      if (tile + 1 < s.end_tile)
        next = find_tokens(p, plan, s, range, (tile + 1) * kTokens + producer * kMyTokens, page);
      if (tile + 2 < s.end_tile) page = lookup_page(p, plan, s, range, (tile + 2) * kTokens + my_first);
      if (tile < s.first_tile) continue;
      copy_raw<LatentTile::kRotated>(control, p, stage, producer, now);
      copy_raw<LatentTile::kLeft>(control, p, stage, producer, now);
      const float left = Raw::load_factor(p.kv_pool, LatentTile::kLeft, now);
      const float right = Raw::load_factor(p.kv_pool, LatentTile::kRight, now);
      if constexpr (Raw::has(LatentTile::kRotated))
        dequantize_part<LatentTile::kRotated, 1>(control, stage, producer, now, 1);
      copy_raw<LatentTile::kRight>(control, p, stage, producer, now);
      dequantize_part<LatentTile::kLeft, 1>(control, stage, producer, now, left);
      dequantize_part<LatentTile::kRight, 0>(control, stage, producer, now, right);
      stage.advance();
    }
  }

  template <int kPart>
  __device__ __forceinline__ void copy_raw(Control& control, const MlaTreeAttentionParams& p, Turn<kStages> stage,
                                           int producer, Tokens tokens) {
    if constexpr (!RawTokens<T, Row>::has(kPart)) {
      copy_part<kPart>(control, p, stage, producer, tokens);
    } else {
      control.empty[stage.at][kPart].wait(stage.parity ^ 1);
      RawTokens<T, Row>::template copy<kPart>(place(stage.at, kPart, producer), p.kv_pool, tokens);
    }
  }

  template <int kPart, int kLater>
  __device__ __forceinline__ void dequantize_part(Control& control, Turn<kStages> stage, int producer, Tokens tokens,
                                                  float factor) {
    RawTokens<T, Row>::template dequantize<kPart, kLater>(place(stage.at, kPart, producer), factor);
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
      if (kPart == LatentTile::kRotated) control.present[stage.at][producer] = static_cast<uint16_t>(tokens.present);
      control.full[stage.at][kPart].arrive();
    }
  }

  // Return where this producer's tokens of a part begin.
  __device__ unsigned char* place(int stage, int part, int producer) {
    return stages[stage].bytes + LatentTile::start(part) +
           producer * (kMyTokens / LatentTile::kGroupTokens) * LatentTile::group_bytes(part);
  }
};

}  // namespace specdec::mla
