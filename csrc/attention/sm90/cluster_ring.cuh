// The KV pipeline of a block in a cluster: its even share of one request's KV, derived from that request's lengths
// alone.
#pragma once

#include "attention/sm90/dequant_ring.cuh"
#include "core/cluster.cuh"

namespace specdec::attention {

// Return whether these tokens of a row tile are split across all clusters that share it; else the first cluster has
// them all.
__device__ __forceinline__ bool is_split_across_clusters(const DevicePlan& plan, int first_row, Span all) {
  return plan.sharing_clusters > 1 && first_row < plan.tile_rows * plan.row_tiles &&
         all.end - all.begin >= kMinSharedTokens;
}
__device__ __forceinline__ bool is_split_across_clusters(const TreeAttentionParams& p, const DevicePlan& plan,
                                                         const Request& r, int first_row) {
  return first_row < r.valid_rows * plan.gqa_group.divisor &&
         is_split_across_clusters(plan, first_row, span_of(p, plan, r, first_row, plan.tile_rows));
}

// Return this block's share of the tokens visible to the row tile from `first_row` on; empty if begin >= end.
__device__ __forceinline__ Span share_of(const TreeAttentionParams& p, const DevicePlan& plan, const Request& r,
                                         int first_row) {
  constexpr unsigned kUnit = 16;  // tokens; shares are multiples of it
  if (first_row >= r.valid_rows * plan.gqa_group.divisor) return {0, 0};
  const Span all = span_of(p, plan, r, first_row, plan.tile_rows);
  if (all.begin >= all.end) return {0, 0};
  const unsigned first = static_cast<unsigned>(all.begin) / kUnit;
  const unsigned units = static_cast<unsigned>(all.end - 1) / kUnit + 1 - first;
  const unsigned rank = blockIdx.x;
  const unsigned size =
      static_cast<unsigned>(is_split_across_clusters(plan, first_row, all) ? plan.cluster_blocks * plan.sharing_clusters
                                                                           : plan.cluster_blocks);
  if (rank >= size) return {0, 0};
  const unsigned each = units / size, remainder = units % size;
  const unsigned begin = first + each * rank + min(rank, remainder), end = begin + each + (rank < remainder);
  const auto row = [&](unsigned unit) { return static_cast<int>(min(unit * kUnit, static_cast<unsigned>(all.end))); };
  return {max(row(begin), all.begin), row(end)};
}

// Copy a share, tile by tile, into a ring with the layout of KvRing. A warp copies 32 tokens of a tile; if that leaves
// warps over, two teams take turns at tiles, because looking up 16 tokens takes a warp as long as looking up 32.
template <int kTokens_, int kRowBytes_, int kStages_, int kConsumers_, int kProducers_ = 4, int kDequantizers_ = 0>
class ClusterRing : KvRing<kTokens_, kRowBytes_, kStages_, kConsumers_, kTokens_ / kWarp, false, kDequantizers_> {
  using Base = KvRing<kTokens_, kRowBytes_, kStages_, kConsumers_, kTokens_ / kWarp, false, kDequantizers_>;
  using Base::kChunk, Base::kChunks, Base::kMyTokens, Base::kReaders;
  using typename Base::Pages, typename Base::Addresses;
  static_assert(kMyTokens == kWarp && kChunks == 1);

 public:
  using Base::kTokens, Base::kRowBytes, Base::kStages, Base::kConsumers;
  using typename Base::Stage;
  static constexpr int kProducers = kProducers_;
  using Quantized = ClusterRing;  // the part that copies

 private:
  static constexpr int kWarpsOfTile = kTokens / kWarp, kTeams = kProducers / kWarpsOfTile;
  static_assert(kTeams == 1 || kTeams == 2);

 public:
  static constexpr int kStageBytes = kStages * sizeof(Stage);

  struct Shared {
    static constexpr int kStages = Base::kStages;
    using Cursor = typename Base::Cursor;
    static constexpr bool kSeparateKv = false;
    __device__ const unsigned char* keys(int stage) const { return stages[stage].k; }
    __device__ const unsigned char* values(int stage) const { return stages[stage].v; }
    alignas(128) Stage stages[kStages];
    alignas(8) uint16_t present[kStages][kTokens / 16];
    Mbarrier full[kStages], empty[kStages];
    Mbarrier request_full;  // completes when `request` is written
    Request request;        // as the consumers read it after the preceding kernels have finished

    // Initialize the barriers. Call from one thread, before the block's first __syncthreads().
    __device__ void init() {
      for (int s = 0; s < kStages; ++s) {
        full[s].init((kWarp + 1) * kWarpsOfTile);
        empty[s].init(kReaders);
      }
      request_full.init(1);
    }
    __device__ uint64_t present_tokens(int stage, int word) const {
      return reinterpret_cast<const uint64_t*>(present[stage])[word];
    }
  };

  // Constructed by a producer warp. `s` is speculative: it was read before the preceding kernels finished.
  __device__ ClusterRing(Shared& shared, const TreeAttentionParams& p, const DevicePlan& plan, Segment& s)
      : shared_(shared), p_(p), plan_(plan), s_(s) {
    if (my_tile_ == 1) stage_.advance();
  }

  // Copy the first share. While the preceding kernels still run, look up the pages of its first tiles and prefetch
  // their tokens into the L2. After the wait, start the copies and look the pages up again; the copies count only if
  // the speculation was right.
  __device__ void copy_first_share() {
    Span share = share_of(p_, plan_, s_.request, s_.first_row);
    int first = my_begin(share);
    const Pages pages = load_pages(share, first);
    Addresses addresses;
    bool speculated = speculate(share, first, pages, addresses);
    prefetch_tokens(first, pages);
    wait_for_kernels_before();
    let_next_kernel_start();
    Pages now = load_pages(share, first), next = load_pages(share, first + kTeams * kTokens);
    if (speculated) copy(addresses);
    shared_.request_full.wait(0);
    const Request actual = shared_.request;
    if (!(actual == s_.request)) {
      speculated = false;
      s_.request = actual;
      share = share_of(p_, plan_, actual, s_.first_row);
      first = my_begin(share);
      now = load_pages(share, first);
    }
    speculated = __all_sync(kFullMask, speculated && now.page[0] == pages.page[0]);
    if (speculated) {
      publish(addresses);
      first += kTeams * kTokens;
      now = next;
    } else {
      asm volatile("cp.async.wait_all;" ::: "memory");
    }
    copy_tiles(share, first, now);
  }

  __device__ void copy() {
    const Span share = share_of(p_, plan_, s_.request, s_.first_row);
    const int first = my_begin(share);
    copy_tiles(share, first, load_pages(share, first));
  }

 private:
  // Copy this producer's part of its tiles from token `first` on.
  __device__ void copy_tiles(Span share, int first, Pages pages) {
    for (; first < share.end; first += kTeams * kTokens) {
      const Addresses addresses = Base::resolve_addresses(p_, plan_, s_, share, first + my_first(), pages);
      pages = load_pages(share, first + kTeams * kTokens);
      shared_.empty[stage_.at].wait(stage_.parity ^ 1);  // passes at once in the first round: all stages start empty
      copy(addresses);
      publish(addresses);
    }
    if (kTeams == 2) my_tile_ ^= (share.end - share.begin + kTokens - 1) / kTokens & 1;
  }

  __device__ void copy(const Addresses& addresses) const {
    Stage& to = shared_.stages[stage_.at];
    Base::copy(p_.k_pool, to.k, my_first(), addresses.k, addresses.present);
    Base::copy(p_.v_pool, to.v, my_first(), addresses.v, addresses.present);
  }

  __device__ void publish(const Addresses& addresses) {
    shared_.full[stage_.at].arrive_after_copies();
    if (threadIdx.x % kWarp == 0) {
      addresses.publish(shared_.present[stage_.at] + my_first() / 16, 0);
      shared_.full[stage_.at].arrive();
    }
    for (int i = 0; i < kTeams; ++i) stage_.advance();
  }

  // Like lookup_pages(), but past the L1, since the preceding kernels may not have finished.
  __device__ Pages load_pages(Span share, int first) const {
    const int row = first + my_first() + static_cast<int>(threadIdx.x) % kWarp;
    Pages pages{{-1}};
    if (row >= share.begin && row < share.end)
      pages.page[0] = load_past_l1(p_.rows.page_table + s_.request.slot * p_.rows.max_pages + plan_.page_size.div(row));
    return pages;
  }

  // Like resolve_addresses(), without side effects. Return false unless these are tokens of the prefix, all on valid
  // pages.
  __device__ bool speculate(Span share, int first, const Pages& pages, Addresses& addresses) const {
    const int row = first + my_first() + static_cast<int>(threadIdx.x) % kWarp;
    const int bytes = kRowBytes / static_cast<int>(p_.head_dim);
    const kv::KvRow at{pages.page[0], plan_.page_size.rem(row)};
    const bool present = at.page >= 0 && at.page < p_.rows.num_pages;
    addresses.present[0] = __ballot_sync(kFullMask, present);
    addresses.k[0] = present ? static_cast<uint32_t>(row_start(p_.k_strides, at, s_.kv_head) * bytes / 16) : 0;
    addresses.v[0] = present ? static_cast<uint32_t>(row_start(p_.v_strides, at, s_.kv_head) * bytes / 16) : 0;
    return first < share.end && (p_.mask == nullptr || min(first + kTokens, share.end) <= s_.request.prefix) &&
           __all_sync(kFullMask, present || row >= share.end);
  }

  // Prefetch this producer's part of a tile into the L2: a preceding kernel that still writes it also writes to the L2.
  __device__ void prefetch_tokens(int first, const Pages& pages) const {
    const int row = first + my_first() + static_cast<int>(threadIdx.x) % kWarp;
    const kv::KvRow at{pages.page[0], plan_.page_size.rem(row)};
    if (at.page < 0 || at.page >= p_.rows.num_pages) return;
    const int bytes = kRowBytes / static_cast<int>(p_.head_dim);
    prefetch_row(static_cast<const char*>(p_.k_pool) + row_start(p_.k_strides, at, s_.kv_head) * bytes);
    prefetch_row(static_cast<const char*>(p_.v_pool) + row_start(p_.v_strides, at, s_.kv_head) * bytes);
  }
  __device__ static void prefetch_row(const char* row) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "n"(kRowBytes) : "memory");
  }

  __device__ int my_begin(Span share) const { return share.begin + my_tile_ * kTokens; }
  __device__ static int my_first() { return static_cast<int>(threadIdx.x) / kWarp % kWarpsOfTile * kMyTokens; }

  Shared& shared_;
  const TreeAttentionParams& p_;
  const DevicePlan& plan_;
  Segment& s_;
  // Index of this warp's first tile in a share.
  int my_tile_ = (static_cast<int>(threadIdx.x) / kWarp - kConsumers) / kWarpsOfTile;
  Turn<kStages> stage_;
};

// The same for FP8 pools that are dequantized in shared memory: two warps copy tiles of 64 tokens, two more dequantize
// them.
template <int D, int kKStages_, int kVStages_, int kQuantizedStages, int kConsumers_>
struct ClusterDequantRing {
  using Quantized = ClusterRing<64, D, kQuantizedStages, kConsumers_, 2, kDequantizers>;
  using Tiles = DequantTiles<64, D, kKStages_, kVStages_>;
  using Dequantized = DequantBarriers<Tiles, 64, D, kConsumers_>;
  static constexpr int kTokens = 64, kKStages = kKStages_, kVStages = kVStages_, kConsumers = kConsumers_;
  static constexpr int kProducers = Quantized::kProducers;
  using Stage = typename Dequantized::Stage;
  static constexpr int kStageBytes = sizeof(Tiles) + Quantized::kStageBytes;

  struct Shared : Tiles, Quantized::Shared, Dequantized {  // follows the queries, which end at a multiple of 1024 bytes
    using Dequantized::kSeparateKv, Dequantized::full, Dequantized::full_v, Dequantized::empty, Dequantized::empty_v,
        Dequantized::present_tokens;
    using Tiles::keys, Tiles::values;
    using typename Dequantized::Cursor;

    // Initialize the barriers. Call from one thread, before the block's first __syncthreads().
    __device__ void init() {
      Dequantized::init();
      Quantized::Shared::init();
    }
  };

  // Run in a dequantizer warp.
  class Dequantizer {
   public:
    __device__ explicit Dequantizer(Shared& shared) : shared_(shared) {}
    __device__ void dequantize(Span share) {
      const int dequantizer = static_cast<int>(threadIdx.x) / kWarp - kConsumers - kProducers;
      for (int first = share.begin; first < share.end; first += kTokens)
        shared_.dequantize_tile(dequantizer, static_cast<typename Quantized::Shared&>(shared_), from_,
                                static_cast<Tiles&>(shared_), to_, to_v_);
    }

   private:
    Shared& shared_;
    Turn<kQuantizedStages> from_;
    Turn<kKStages> to_;
    Turn<kVStages> to_v_;
  };
};

}  // namespace specdec::attention
