// What each block of a cluster reads of the KV of one request and KV head: even shares, in order, found from that
// request's lengths alone.
#pragma once

#include "attention/widened_stream.cuh"
#include "core/cluster.cuh"

namespace specdec::few {

// Whether all clusters of a row tile that may see these KV rows share them, or the first one has them all.
__device__ __forceinline__ bool is_shared(const Cut& cut, int first_row, Span all) {
  return cut.parts > 1 && first_row < cut.rows * cut.lanes && all.end - all.begin >= kWorthSharing;
}
__device__ __forceinline__ bool is_shared(const TreeAttentionParams& p, const Cut& cut, const Request& r,
                                          int first_row) {
  return first_row < r.valid_rows * cut.group.divisor &&
         is_shared(cut, first_row, span_of(p, cut, r, first_row, cut.rows));
}

// Of the KV rows that some row of the tile from `first_row` on may see, this block's; none where begin >= end.
__device__ __forceinline__ Span share_of(const TreeAttentionParams& p, const Cut& cut, const Request& r,
                                         int first_row) {
  constexpr unsigned kUnit = 16;  // KV rows; a share is a number of them
  if (first_row >= r.valid_rows * cut.group.divisor) return {0, 0};
  const Span all = span_of(p, cut, r, first_row, cut.rows);
  if (all.begin >= all.end) return {0, 0};
  const unsigned first = static_cast<unsigned>(all.begin) / kUnit;
  const unsigned units = static_cast<unsigned>(all.end - 1) / kUnit + 1 - first;
  const unsigned rank = blockIdx.x;
  const unsigned size = static_cast<unsigned>(is_shared(cut, first_row, all) ? cut.cluster * cut.parts : cut.cluster);
  if (rank >= size) return {0, 0};
  const unsigned each = units / size, longer = units % size;
  const unsigned begin = first + each * rank + min(rank, longer), end = begin + each + (rank < longer);
  const auto row = [&](unsigned unit) { return static_cast<int>(min(unit * kUnit, static_cast<unsigned>(all.end))); };
  return {max(row(begin), all.begin), row(end)};
}

// Copies a share, tile by tile from where it starts, into stages of shared memory, as a KvStream does its tiles. A warp
// copies 32 rows of a tile, and as many as that leaves take turns: what a warp finds out about its rows takes as long
// for 16 of them as for 32.
template <int kTokens_, int kRowBytes_, int kStages_, int kConsumers_, int kProducers_ = 4, int kWideners_ = 0>
class ShareStream : KvStream<kTokens_, kRowBytes_, kStages_, kConsumers_, kTokens_ / kWarp, false, kWideners_> {
  using Base = KvStream<kTokens_, kRowBytes_, kStages_, kConsumers_, kTokens_ / kWarp, false, kWideners_>;
  using Base::kChunk, Base::kEach, Base::kMyRows, Base::kReaders;
  using typename Base::Pages, typename Base::Rows;
  static_assert(kMyRows == kWarp && kEach == 1);

 public:
  using Base::kTokens, Base::kRowBytes, Base::kStages, Base::kConsumers;
  using typename Base::Stage;
  static constexpr int kProducers = kProducers_;
  using Narrow = ShareStream;  // what copies

 private:
  static constexpr int kWarpsOfTile = kTokens / kWarp, kTurns = kProducers / kWarpsOfTile;
  static_assert(kTurns == 1 || kTurns == 2);

 public:
  static constexpr int kStageBytes = kStages * sizeof(Stage);

  struct Shared {
    static constexpr int kStages = Base::kStages;
    using Place = typename Base::Place;
    static constexpr bool kApart = false;
    __device__ const unsigned char* keys(int stage) const { return stages[stage].k; }
    __device__ const unsigned char* values(int stage) const { return stages[stage].v; }
    alignas(128) Stage stages[kStages];
    alignas(8) uint16_t there[kStages][kTokens / 16];
    Mbarrier full[kStages], empty[kStages];
    Mbarrier known;   // `request` is
    Request request;  // as consumers see it once kernels before have finished

    // By one thread, before the block's first barrier.
    __device__ void init() {
      for (int s = 0; s < kStages; ++s) {
        full[s].init((kWarp + 1) * kWarpsOfTile);
        empty[s].init(kReaders);
      }
      known.init(1);
    }
    __device__ uint64_t rows_there(int stage, int word) const {
      return reinterpret_cast<const uint64_t*>(there[stage])[word];
    }
  };

  // Of one producer warp. `s` is what the lengths make of it before kernels before have finished.
  __device__ ShareStream(Shared& shared, const TreeAttentionParams& p, const Cut& cut, Segment& s)
      : shared_(shared), p_(p), cut_(cut), s_(s) {
    if (mine_ == 1) stage_.advance();
  }

  // Copies the first share. Where its first tiles are is found out while kernels before run, which lets them be asked
  // into the L2, and again while they are on their way from there: they count only if it was true.
  __device__ void copy_first() {
    Span share = share_of(p_, cut_, s_.request, s_.first_row);
    int first = my_begin(share);
    const Pages pages = load_pages(share, first);
    Rows rows;
    bool guessed = guess(share, first, pages, rows);
    ask_for_rows(first, pages);
    wait_for_kernels_before();
    let_next_kernel_start();
    Pages now = load_pages(share, first), next = load_pages(share, first + kTurns * kTokens);
    if (guessed) copy(rows);
    shared_.known.wait(0);
    const Request truth = shared_.request;
    if (!(truth == s_.request)) {
      guessed = false;
      s_.request = truth;
      share = share_of(p_, cut_, truth, s_.first_row);
      first = my_begin(share);
      now = load_pages(share, first);
    }
    guessed = __all_sync(kFullMask, guessed && now.page[0] == pages.page[0]);
    if (guessed) {
      publish(rows);
      first += kTurns * kTokens;
      now = next;
    } else {
      asm volatile("cp.async.wait_all;" ::: "memory");
    }
    copy_from(share, first, now);
  }

  __device__ void copy() {
    const Span share = share_of(p_, cut_, s_.request, s_.first_row);
    const int first = my_begin(share);
    copy_from(share, first, load_pages(share, first));
  }

 private:
  // A producer's part of its tiles from KV row `first` on.
  __device__ void copy_from(Span share, int first, Pages pages) {
    for (; first < share.end; first += kTurns * kTokens) {
      const Rows rows = Base::find_rows(p_, cut_, s_, share, first + my_first(), pages);
      pages = load_pages(share, first + kTurns * kTokens);
      shared_.empty[stage_.at].wait(stage_.parity ^ 1);  // the first round is empty
      copy(rows);
      publish(rows);
    }
    if (kTurns == 2) mine_ ^= (share.end - share.begin + kTokens - 1) / kTokens & 1;
  }

  __device__ void copy(const Rows& rows) const {
    Stage& to = shared_.stages[stage_.at];
    Base::copy(p_.k_pool, to.k, my_first(), rows.k, rows.there);
    Base::copy(p_.v_pool, to.v, my_first(), rows.v, rows.there);
  }

  __device__ void publish(const Rows& rows) {
    shared_.full[stage_.at].arrive_after_copies();
    if (threadIdx.x % kWarp == 0) {
      rows.tell(shared_.there[stage_.at] + my_first() / 16, 0);
      shared_.full[stage_.at].arrive();
    }
    for (int i = 0; i < kTurns; ++i) stage_.advance();
  }

  // As find_pages, past the L1: kernels before may not have finished.
  __device__ Pages load_pages(Span share, int first) const {
    const int row = first + my_first() + static_cast<int>(threadIdx.x) % kWarp;
    Pages pages{{-1}};
    if (row >= share.begin && row < share.end)
      pages.page[0] = fresh(p_.rows.page_table + s_.request.slot * p_.rows.max_pages + cut_.page_size.div(row));
    return pages;
  }

  // As find_rows, without consequences: false where these are not rows of the prefix, all on their pages.
  __device__ bool guess(Span share, int first, const Pages& pages, Rows& rows) const {
    const int row = first + my_first() + static_cast<int>(threadIdx.x) % kWarp;
    const int bytes = kRowBytes / static_cast<int>(p_.head_dim);
    const KvRow at{pages.page[0], cut_.page_size.rem(row)};
    const bool there = at.page >= 0 && at.page < p_.rows.num_pages;
    rows.there[0] = __ballot_sync(kFullMask, there);
    rows.k[0] = there ? static_cast<uint32_t>(row_start(p_.k_strides, at, s_.head) * bytes / 16) : 0;
    rows.v[0] = there ? static_cast<uint32_t>(row_start(p_.v_strides, at, s_.head) * bytes / 16) : 0;
    return first < share.end && (p_.mask == nullptr || min(first + kTokens, share.end) <= s_.request.prefix) &&
           __all_sync(kFullMask, there || row >= share.end);
  }

  // Asks a producer's part of a tile into the L2: whoever still writes it meets it there.
  __device__ void ask_for_rows(int first, const Pages& pages) const {
    const int row = first + my_first() + static_cast<int>(threadIdx.x) % kWarp;
    const KvRow at{pages.page[0], cut_.page_size.rem(row)};
    if (at.page < 0 || at.page >= p_.rows.num_pages) return;
    const int bytes = kRowBytes / static_cast<int>(p_.head_dim);
    ask(static_cast<const char*>(p_.k_pool) + row_start(p_.k_strides, at, s_.head) * bytes);
    ask(static_cast<const char*>(p_.v_pool) + row_start(p_.v_strides, at, s_.head) * bytes);
  }
  __device__ static void ask(const char* row) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "n"(kRowBytes) : "memory");
  }

  __device__ int my_begin(Span share) const { return share.begin + mine_ * kTokens; }
  __device__ static int my_first() { return static_cast<int>(threadIdx.x) / kWarp % kWarpsOfTile * kMyRows; }

  Shared& shared_;
  const TreeAttentionParams& p_;
  const Cut& cut_;
  Segment& s_;
  // The first tile of a share that is this warp's.
  int mine_ = (static_cast<int>(threadIdx.x) / kWarp - kConsumers) / kWarpsOfTile;
  Turn<kStages> stage_;
};

// The same of pools of 8 bits for those who multiply 16: two warps copy tiles of 64 tokens, two more widen them.
template <int D, int kKeys_, int kValues_, int kNarrowStages, int kConsumers_>
struct WidenedShare {
  using Narrow = ShareStream<64, D, kNarrowStages, kConsumers_, 2, kWideners>;
  using Tiles = WideTiles<64, D, kKeys_, kValues_>;
  using Wide = WideBarriers<Tiles, 64, D, kConsumers_>;
  static constexpr int kTokens = 64, kKeys = kKeys_, kValues = kValues_, kConsumers = kConsumers_;
  static constexpr int kProducers = Narrow::kProducers;
  using Stage = typename Wide::Stage;
  static constexpr int kStageBytes = sizeof(Tiles) + Narrow::kStageBytes;

  struct Shared : Tiles, Narrow::Shared, Wide {  // behind the queries, that is on 1024 bytes
    using Tiles::keys, Tiles::values;
    using typename Wide::Place;
    using Wide::kApart, Wide::full, Wide::full_v, Wide::empty, Wide::empty_v, Wide::rows_there;

    // By one thread, before the block's first barrier.
    __device__ void init() {
      Wide::init();
      Narrow::Shared::init();
    }
  };

  // Of one widening warp.
  class Widener {
   public:
    __device__ explicit Widener(Shared& shared) : shared_(shared) {}
    __device__ void widen(Span share) {
      const int widener = static_cast<int>(threadIdx.x) / kWarp - kConsumers - kProducers;
      for (int first = share.begin; first < share.end; first += kTokens)
        shared_.widen_tile(widener, static_cast<typename Narrow::Shared&>(shared_), from_, static_cast<Tiles&>(shared_),
                           to_, to_v_);
    }

   private:
    Shared& shared_;
    Turn<kNarrowStages> from_;
    Turn<kKeys> to_;
    Turn<kValues> to_v_;
  };
};

}  // namespace specdec::few
