// The KV of a cluster's block: even shares of one request's KV, in order, found from that request's lengths alone.
#pragma once

#include "attention/sm90/dequant_ring.cuh"
#include "core/cluster.cuh"

namespace specdec::attention {

// Whether these tokens of a row tile are split between all clusters that share it; else the first cluster has them all.
__device__ __forceinline__ bool is_split_between_clusters(const DevicePlan& plan, int first_row, Span all) {
  return plan.sharing_clusters > 1 && first_row < plan.tile_rows * plan.row_tiles &&
         all.end - all.begin >= kMinSharedTokens;
}
__device__ __forceinline__ bool is_split_between_clusters(const TreeAttentionParams& p, const DevicePlan& plan,
                                                          const Request& r, int first_row) {
  return first_row < r.valid_rows * plan.gqa_group.divisor &&
         is_split_between_clusters(plan, first_row, span_of(p, plan, r, first_row, plan.tile_rows));
}

// This block's share of the tokens that some row of the tile from `first_row` on may see; empty where begin >= end.
__device__ __forceinline__ Span share_of(const TreeAttentionParams& p, const DevicePlan& plan, const Request& r,
                                         int first_row) {
  constexpr unsigned kUnit = 16;  // tokens; a share is a number of such units
  if (first_row >= r.valid_rows * plan.gqa_group.divisor) return {0, 0};
  const Span all = span_of(p, plan, r, first_row, plan.tile_rows);
  if (all.begin >= all.end) return {0, 0};
  const unsigned first = static_cast<unsigned>(all.begin) / kUnit;
  const unsigned units = static_cast<unsigned>(all.end - 1) / kUnit + 1 - first;
  const unsigned rank = blockIdx.x;
  const unsigned size = static_cast<unsigned>(is_split_between_clusters(plan, first_row, all)
                                                  ? plan.cluster_blocks * plan.sharing_clusters
                                                  : plan.cluster_blocks);
  if (rank >= size) return {0, 0};
  const unsigned each = units / size, longer = units % size;
  const unsigned begin = first + each * rank + min(rank, longer), end = begin + each + (rank < longer);
  const auto row = [&](unsigned unit) { return static_cast<int>(min(unit * kUnit, static_cast<unsigned>(all.end))); };
  return {max(row(begin), all.begin), row(end)};
}

// Copies a share, tile by tile from its beginning, into a ring as a KvRing has it. A warp copies 32 tokens of a tile,
// and the warps that are then left over take turns: to look up 16 tokens takes a warp as long as to look up 32.
template <int kTokens_, int kRowBytes_, int kStages_, int kConsumers_, int kProducers_ = 4, int kDequantisers_ = 0>
class ClusterRing : KvRing<kTokens_, kRowBytes_, kStages_, kConsumers_, kTokens_ / kWarp, false, kDequantisers_> {
  using Base = KvRing<kTokens_, kRowBytes_, kStages_, kConsumers_, kTokens_ / kWarp, false, kDequantisers_>;
  using Base::kChunk, Base::kEach, Base::kMyTokens, Base::kReaders;
  using typename Base::Pages, typename Base::Addresses;
  static_assert(kMyTokens == kWarp && kEach == 1);

 public:
  using Base::kTokens, Base::kRowBytes, Base::kStages, Base::kConsumers;
  using typename Base::Stage;
  static constexpr int kProducers = kProducers_;
  using Quantised = ClusterRing;  // the part that copies

 private:
  static constexpr int kWarpsOfTile = kTokens / kWarp, kTurns = kProducers / kWarpsOfTile;
  static_assert(kTurns == 1 || kTurns == 2);

 public:
  static constexpr int kStageBytes = kStages * sizeof(Stage);

  struct Shared {
    static constexpr int kStages = Base::kStages;
    using Cursor = typename Base::Cursor;
    static constexpr bool kApart = false;
    __device__ const unsigned char* keys(int stage) const { return stages[stage].k; }
    __device__ const unsigned char* values(int stage) const { return stages[stage].v; }
    alignas(128) Stage stages[kStages];
    alignas(8) uint16_t present[kStages][kTokens / 16];
    Mbarrier full[kStages], empty[kStages];
    Mbarrier known;   // of `request`
    Request request;  // as consumers see it once the kernels before this one have finished

    // By one thread, before the block's first barrier.
    __device__ void init() {
      for (int s = 0; s < kStages; ++s) {
        full[s].init((kWarp + 1) * kWarpsOfTile);
        empty[s].init(kReaders);
      }
      known.init(1);
    }
    __device__ uint64_t present_tokens(int stage, int word) const {
      return reinterpret_cast<const uint64_t*>(present[stage])[word];
    }
  };

  // For one producer warp. `s` is a guess, made before the kernels before this one have finished.
  __device__ ClusterRing(Shared& shared, const TreeAttentionParams& p, const DevicePlan& plan, Segment& s)
      : shared_(shared), p_(p), plan_(plan), s_(s) {
    if (mine_ == 1) stage_.advance();
  }

  // Copies the first share. The pages of its first tiles are looked up while the kernels before this one run, and their
  // tokens prefetched into the L2. They are looked up again while the copies run, which count only if the guess was
  // right.
  __device__ void copy_first() {
    Span share = share_of(p_, plan_, s_.request, s_.first_row);
    int first = my_begin(share);
    const Pages pages = load_pages(share, first);
    Addresses addresses;
    bool guessed = guess(share, first, pages, addresses);
    prefetch_tokens(first, pages);
    wait_for_kernels_before();
    let_next_kernel_start();
    Pages now = load_pages(share, first), next = load_pages(share, first + kTurns * kTokens);
    if (guessed) copy(addresses);
    shared_.known.wait(0);
    const Request truth = shared_.request;
    if (!(truth == s_.request)) {
      guessed = false;
      s_.request = truth;
      share = share_of(p_, plan_, truth, s_.first_row);
      first = my_begin(share);
      now = load_pages(share, first);
    }
    guessed = __all_sync(kFullMask, guessed && now.page[0] == pages.page[0]);
    if (guessed) {
      publish(addresses);
      first += kTurns * kTokens;
      now = next;
    } else {
      asm volatile("cp.async.wait_all;" ::: "memory");
    }
    copy_from(share, first, now);
  }

  __device__ void copy() {
    const Span share = share_of(p_, plan_, s_.request, s_.first_row);
    const int first = my_begin(share);
    copy_from(share, first, load_pages(share, first));
  }

 private:
  // Copies a producer's part of its tiles from token `first` on.
  __device__ void copy_from(Span share, int first, Pages pages) {
    for (; first < share.end; first += kTurns * kTokens) {
      const Addresses addresses = Base::find_addresses(p_, plan_, s_, share, first + my_first(), pages);
      pages = load_pages(share, first + kTurns * kTokens);
      shared_.empty[stage_.at].wait(stage_.parity ^ 1);  // the first round finds all stages empty
      copy(addresses);
      publish(addresses);
    }
    if (kTurns == 2) mine_ ^= (share.end - share.begin + kTokens - 1) / kTokens & 1;
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
    for (int i = 0; i < kTurns; ++i) stage_.advance();
  }

  // As find_pages, past the L1, since the kernels before this one may not have finished.
  __device__ Pages load_pages(Span share, int first) const {
    const int row = first + my_first() + static_cast<int>(threadIdx.x) % kWarp;
    Pages pages{{-1}};
    if (row >= share.begin && row < share.end)
      pages.page[0] = fresh(p_.rows.page_table + s_.request.slot * p_.rows.max_pages + plan_.page_size.div(row));
    return pages;
  }

  // As find_addresses, without consequences. Returns false unless these are tokens of the prefix, all on their pages.
  __device__ bool guess(Span share, int first, const Pages& pages, Addresses& addresses) const {
    const int row = first + my_first() + static_cast<int>(threadIdx.x) % kWarp;
    const int bytes = kRowBytes / static_cast<int>(p_.head_dim);
    const kv::KvRow at{pages.page[0], plan_.page_size.rem(row)};
    const bool there = at.page >= 0 && at.page < p_.rows.num_pages;
    addresses.present[0] = __ballot_sync(kFullMask, there);
    addresses.k[0] = there ? static_cast<uint32_t>(row_start(p_.k_strides, at, s_.kv_head) * bytes / 16) : 0;
    addresses.v[0] = there ? static_cast<uint32_t>(row_start(p_.v_strides, at, s_.kv_head) * bytes / 16) : 0;
    return first < share.end && (p_.mask == nullptr || min(first + kTokens, share.end) <= s_.request.prefix) &&
           __all_sync(kFullMask, there || row >= share.end);
  }

  // Prefetches a producer's part of a tile into the L2: if a kernel before still writes it, it writes it there.
  __device__ void prefetch_tokens(int first, const Pages& pages) const {
    const int row = first + my_first() + static_cast<int>(threadIdx.x) % kWarp;
    const kv::KvRow at{pages.page[0], plan_.page_size.rem(row)};
    if (at.page < 0 || at.page >= p_.rows.num_pages) return;
    const int bytes = kRowBytes / static_cast<int>(p_.head_dim);
    ask(static_cast<const char*>(p_.k_pool) + row_start(p_.k_strides, at, s_.kv_head) * bytes);
    ask(static_cast<const char*>(p_.v_pool) + row_start(p_.v_strides, at, s_.kv_head) * bytes);
  }
  __device__ static void ask(const char* row) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "n"(kRowBytes) : "memory");
  }

  __device__ int my_begin(Span share) const { return share.begin + mine_ * kTokens; }
  __device__ static int my_first() { return static_cast<int>(threadIdx.x) / kWarp % kWarpsOfTile * kMyTokens; }

  Shared& shared_;
  const TreeAttentionParams& p_;
  const DevicePlan& plan_;
  Segment& s_;
  // The number of this warp's first tile in a share.
  int mine_ = (static_cast<int>(threadIdx.x) / kWarp - kConsumers) / kWarpsOfTile;
  Turn<kStages> stage_;
};

// The same for 8-bit pools that are dequantised in shared memory: two warps copy tiles of 64 tokens, two more
// dequantise them.
template <int D, int kKeys_, int kValues_, int kQuantisedStages, int kConsumers_>
struct ClusterDequantRing {
  using Quantised = ClusterRing<64, D, kQuantisedStages, kConsumers_, 2, kDequantisers>;
  using Tiles = DequantTiles<64, D, kKeys_, kValues_>;
  using Dequantised = DequantBarriers<Tiles, 64, D, kConsumers_>;
  static constexpr int kTokens = 64, kKeys = kKeys_, kValues = kValues_, kConsumers = kConsumers_;
  static constexpr int kProducers = Quantised::kProducers;
  using Stage = typename Dequantised::Stage;
  static constexpr int kStageBytes = sizeof(Tiles) + Quantised::kStageBytes;

  struct Shared : Tiles, Quantised::Shared, Dequantised {  // behind the queries, which end on 1024 bytes
    using Dequantised::kApart, Dequantised::full, Dequantised::full_v, Dequantised::empty, Dequantised::empty_v,
        Dequantised::present_tokens;
    using Tiles::keys, Tiles::values;
    using typename Dequantised::Cursor;

    // By one thread, before the block's first barrier.
    __device__ void init() {
      Dequantised::init();
      Quantised::Shared::init();
    }
  };

  // For one dequantising warp.
  class Dequantiser {
   public:
    __device__ explicit Dequantiser(Shared& shared) : shared_(shared) {}
    __device__ void dequantise(Span share) {
      const int dequantiser = static_cast<int>(threadIdx.x) / kWarp - kConsumers - kProducers;
      for (int first = share.begin; first < share.end; first += kTokens)
        shared_.dequantise_tile(dequantiser, static_cast<typename Quantised::Shared&>(shared_), from_,
                                static_cast<Tiles&>(shared_), to_, to_v_);
    }

   private:
    Shared& shared_;
    Turn<kQuantisedStages> from_;
    Turn<kKeys> to_;
    Turn<kValues> to_v_;
  };
};

}  // namespace specdec::attention
