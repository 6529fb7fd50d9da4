// Stream-K: how the work of one call is split into even shares, by each block for itself, from lengths that only the
// device knows. An item is a request, a KV head and up to plan.row_tiles row tiles; its KV is a number of tiles. All
// tiles of all items lie on one line: request after request, KV head after head, item after item, tile after tile. Of n
// workers, worker w does units [w N / n, (w + 1) N / n) of the N on the line. So a worker meets at most two items that
// it does not do alone, the first and the last of its share, and leaves at most two partial results: their space
// depends on neither batch nor lengths. Where items differ little from a share, none of them is split.
#pragma once

#include "attention/common/device_plan.cuh"
#include "attention/common/visibility.h"
#include "core/cuda.cuh"
#include "core/warp.cuh"

namespace specdec::attention {

// A piece of an item that one worker does: what of the item lies in its share, or with fixed_split one split of it. The
// partial results of an item lie in the order of its KV: the first, of the worker in whose share the item begins, at 2
// worker + 1; the following ones at 2 (worker + 1), 2 (worker + 2), ...; with fixed_split each at the number of its
// unit.
struct Segment {
  Request request;
  int kv_head;                 // -1: the worker has nothing left to do
  int first_row;               // of the item
  int first_tile, end_tile;    // KV tiles
  int splits;                  // partial results of the item; 1: it is not split
  int partial, first_partial;  // which partial result this segment leaves, and which is the item's first
  int workers, rank;           // workers that do some of the item, and which of them this one is
  bool last;                   // the worker's last segment of the item
  bool merge;                  // nothing is to be summed: the item's partial results are to be merged
};

// Tokens [begin, end).
struct Span {
  int begin, end;
};

// The tokens that some of `count` query rows from `first_row` on may see; there is one such row at least.
__device__ __forceinline__ Span span_of(const TreeAttentionParams& p, const DevicePlan& plan, const Request& r,
                                        int first_row, int count) {
  if (p.mask != nullptr && p.window == INT64_MAX) return {0, r.end};
  const int end_row = min(first_row + count, r.valid_rows * plan.gqa_group.divisor);
  const int begin = visible_begin(p, r, plan.gqa_group.div(first_row));
  return {begin, max(begin, visible_end(p, r, plan.gqa_group.div(end_row - 1)))};
}

struct Tiles {
  int first, end;
};

__device__ __forceinline__ Tiles tiles_of(const TreeAttentionParams& p, const DevicePlan& plan, const Request& r,
                                          int first_row) {
  const Span span = span_of(p, plan, r, first_row, plan.tile_rows * plan.row_tiles);
  const int first = plan.tile_tokens.div(span.begin);
  return {first, span.begin == span.end ? first : plan.tile_tokens.div(span.end - 1) + 1};
}

// The units of work that these tiles are: one for each tile, for each split with fixed_split, or one in all where items
// are whole.
__device__ __forceinline__ int units_in(const TreeAttentionParams& p, const DevicePlan& plan, Tiles tiles, bool whole) {
  if (tiles.end == tiles.first) return 0;
  if (whole) return 1;
  return plan.split_tiles.div(tiles.end - 1) - plan.split_tiles.div(tiles.first) + 1;
}

// The units of one KV head of a request.
__device__ __forceinline__ int units_of(const TreeAttentionParams& p, const DevicePlan& plan, const Request& r,
                                        bool whole) {
  const int end = r.valid_rows * plan.gqa_group.divisor;
  int units = 0;
  for (int row = 0; row < end; row += plan.tile_rows * plan.row_tiles)
    units += units_in(p, plan, tiles_of(p, plan, r, row), whole);
  return units;
}

// Gives all lanes of a warp what one of them knows.
template <class T>
__device__ __forceinline__ T broadcast(const T& x, int lane) {
  static_assert(sizeof(T) % 4 == 0);
  T y;
#pragma unroll
  for (size_t i = 0; i < sizeof(T) / 4; ++i)
    reinterpret_cast<int*>(&y)[i] = __shfl_sync(kFullMask, reinterpret_cast<const int*>(&x)[i], lane);
  return y;
}

// Requests that a lane caches, lane l those of number l, l + 32, ...: each is read once.
constexpr int kCachedRequests = 4;
using CachedRequests = Request[kCachedRequests];

// Tokens that a worker may have beyond an even share, for each block on its multiprocessor, before splitting pays:
// leaving partial results and merging them costs as much.
constexpr int kSplitCostTokens = 28 * 64;

// What a walk knows, so that it can be kept between its steps.
class StreamKState {
 protected:
  // This lane's request of the last scan, its units, and the units up to it.
  Request mine_{};
  int units_of_mine_ = 0, upto_ = 0, scanned_ = -1;

  int workers_ = 0, total_ = 0;  // total_ = workers_ share_ + longer_, in units
  int share_ = 0, longer_ = 0;
  bool whole_ = false;  // items are not split: each is one unit

  // The position of the walk.
  int worker_ = 0;
  int at_ = 0, end_ = 0;       // units on the line
  int base_ = 0, before_ = 0;  // first request of the last scan, and the units before it
  int lane_ = 0;               // the lane whose request the walk is in
  int head_ = 0, first_row_ = 0;
  Tiles tiles_{};
  int unit_ = 0, units_ = 0;  // of the item

  // The progress of next_segment().
  bool waited_ = false, known_ = false, split_some_ = false, merging_ = false;
};

// The walk of a worker that takes whole items, each of no more rows than plan.row_tiles have: every plan.workers-th of
// them that has KV to be read. It reads the lengths of its own items only.
class WholeItems {
 public:
  // The next segment, or one with head -1. The first call waits for the kernels before this one; while they run, it
  // prefetches what it is likely to read, and fetches its own code. By a warp, all lanes together.
  __device__ __forceinline__ Segment next_segment(const TreeAttentionParams& p, const DevicePlan& plan, int worker) {
    const unsigned heads = static_cast<unsigned>(p.kv_heads);
    bool known = item_ >= 0;
    if (!known) item_ = worker;
    Segment s;
#pragma unroll 1
    while (true) {  // one loop for both passes, since code has to be fetched too
      s.kv_head = -1;
      s.first_row = s.first_tile = s.end_tile = 0;
      const unsigned b = static_cast<unsigned>(item_) / heads;
      if (b < p.batch) {
        s.request = request_of(p, b);
        s.kv_head = static_cast<int>(static_cast<unsigned>(item_) - b * heads);
        if (s.request.valid_rows > 0) {
          const Tiles tiles = tiles_of(p, plan, s.request, 0);
          s.first_tile = tiles.first;
          s.end_tile = tiles.end;
        }
      }
      if (!known) {
        if (s.first_tile < s.end_tile)
          prefetch(p.rows.page_table + s.request.slot * p.rows.max_pages +
                   plan.page_size.div(s.first_tile * plan.tile_tokens.divisor));
        wait_for_kernels_before();
        let_next_kernel_start();
        known = true;
        continue;
      }
      if (s.kv_head < 0) return s;
      item_ += plan.workers;
      if (s.first_tile == s.end_tile) continue;
      s.splits = s.workers = 1;
      s.partial = s.first_partial = s.rank = 0;
      s.last = true;
      s.merge = false;
      return s;
    }
  }

 private:
  int item_ = -1;
};

// The walk of a worker that takes its share of the line. All lanes of a warp call it together. Where registers are
// short, kAllowWhole is false, and lengths cannot decide that items stay whole.
template <bool kAllowWhole>
class StreamK : public StreamKState {
 public:
  __device__ StreamK(const TreeAttentionParams& p, const DevicePlan& plan, const StreamKState& state,
                     CachedRequests& known)
      : StreamKState(state), p_(p), plan_(plan), cached_requests_(known) {}

  // The next segment: first those of the worker's share, then the items to be merged, at last one with head -1. The
  // first call waits for the kernels before this one. The walk is made while they may still change what it reads, and
  // again behind them only if they have: in a chain of calls they rarely do. It is one loop, since code has to be
  // fetched too.
  __device__ __forceinline__ Segment next_segment(int worker) {
#pragma unroll 1
    while (true) {
      if (!known_) {
        measure();
        seek(worker);
      }
      Segment s = next();
      if (!waited_) {
        wait_for_kernels_before();
        let_next_kernel_start();
        waited_ = true;
        if (!holds()) continue;
      }
      known_ = true;
      if (s.kv_head < 0 && split_some_ && !merging_) {
        merging_ = true;  // merging begins when all of the share is done
        seek(worker);
        continue;
      }
      split_some_ |= s.kv_head >= 0 && s.splits > 1;
      s.merge = merging_;
      if (!merging_ || s.kv_head < 0 || (s.splits > 1 && s.last)) return s;
    }
  }

 private:
  // Reads the lengths, from which the rest follows. Where they decide that items stay whole, everything is counted
  // again.
  __device__ void measure() {
    whole_ = false;
#pragma unroll 1
    while (true) {
      int heads = 0, least = INT32_MAX, most = 0;  // KV heads that have units, and units of one of them
      total_ = 0;
      scanned_ = -1;
      for (int base = 0; base < p_.batch; base += kWarp) {
        scan(base, whole());
        total_ += __shfl_sync(kFullMask, upto_, kWarp - 1);
        heads += __popc(__ballot_sync(kFullMask, units_of_mine_ > 0)) * static_cast<int>(p_.kv_heads);
        if (units_of_mine_ > 0) least = min(least, units_of_mine_);
        most = max(most, units_of_mine_);
      }
      workers_ = min(plan_.workers, total_);
      if (workers_ == 0) return;
      least = __reduce_min_sync(kFullMask, least);
      most = __reduce_max_sync(kFullMask, most);
      const int enough =
          total_ / workers_ + plan_.split_tiles.div(plan_.tile_tokens.div(kSplitCostTokens * plan_.blocks_per_sm));
      if (least == most) {
        // Shares that end where KV heads do leave less to merge, or nothing.
        const int each = (heads + workers_ - 1) / workers_;  // KV heads of a worker
        const int fewer = each == 1 ? workers_ - workers_ % heads : heads % each == 0 ? heads / each : 0;
        if (fewer > 0 && (fewer * 16 >= workers_ * 15 || total_ / fewer <= enough)) workers_ = fewer;
      } else if (kAllowWhole && !whole_ && !p_.fixed_split && heads <= workers_ && most <= enough) {
        whole_ = true;
        continue;
      }
      break;
    }
    share_ = total_ / workers_;
    longer_ = total_ - share_ * workers_;
  }
  __device__ bool whole() const { return kAllowWhole && whole_; }

  // Whether the lengths are still those that measure() has read. May be false if they are.
  __device__ bool holds() const {
    if (p_.batch > kCachedRequests * kWarp) return false;
    bool same = true;
#pragma unroll 1
    for (int b = threadIdx.x % kWarp; b < p_.batch; b += kWarp)
      same &= request_of(p_, b) == cached_requests_[b / kWarp];
    return __all_sync(kFullMask, same);
  }

  // Goes to the beginning of a worker's share; a worker without work has an empty one.
  __device__ void seek(int worker) {
    worker_ = worker;
    at_ = worker < workers_ ? begin(worker) : 0;
    end_ = worker < workers_ ? begin(worker + 1) : 0;
    base_ = before_ = unit_ = units_ = 0;
  }

  // The next segment of the share.
  __device__ Segment next() {
    if (at_ < end_ && unit_ == units_ && !enter_item_behind()) enter_item();
    Segment s;
    s.kv_head = -1;
    if (at_ >= end_) return s;
    const int split = plan_.split_tiles.divisor, first = plan_.split_tiles.div(tiles_.first);
    const int count = p_.fixed_split ? 1 : min(end_ - at_, units_ - unit_);
    s.request = broadcast(mine_, lane_);
    s.kv_head = head_;
    s.first_row = first_row_;
    s.first_tile = max((first + unit_) * split, tiles_.first);
    s.end_tile = whole() ? tiles_.end : min((first + unit_ + count) * split, tiles_.end);
    find_partials(s, count);
    s.merge = false;
    at_ += count;
    unit_ += count;
    return s;
  }

  __device__ void find_partials(Segment& s, int count) const {
    s.splits = s.workers = 1;
    s.partial = s.first_partial = s.rank = 0;
    s.last = unit_ + count == units_ || at_ + count == end_;
    if (count == units_) return;
    const int begin = at_ - unit_, first_worker = worker_of(begin);
    s.workers = worker_of(begin + units_ - 1) - first_worker + 1;
    s.rank = worker_ - first_worker;
    s.splits = p_.fixed_split ? units_ : s.workers;
    s.partial = p_.fixed_split ? at_ : 2 * worker_ + (unit_ == 0);
    s.first_partial = p_.fixed_split ? begin : 2 * first_worker + 1;
  }

  __device__ int begin(int worker) const { return share_ * worker + longer_ * worker / workers_; }
  __device__ int worker_of(int unit) const {
    const int near =
        static_cast<int>(static_cast<float>(unit) / static_cast<float>(total_) * workers_);  // right, or off by one
    return near + (begin(near + 1) <= unit) - (begin(near) > unit);
  }

  // Lane l takes request base + l; upto_ becomes the units of it and of the lanes before it.
  __device__ void scan(int base, bool again) {
    const int b = base + static_cast<int>(threadIdx.x) % kWarp, n = base / kWarp;
    mine_ = Request{};
    units_of_mine_ = 0;
    if (b < p_.batch) {
      mine_ = again && n < kCachedRequests ? cached_requests_[n] : request_of(p_, b);
      if (n < kCachedRequests) cached_requests_[n] = mine_;
      units_of_mine_ = units_of(p_, plan_, mine_, whole());
    }
    upto_ = sum_up_to_lane(units_of_mine_ * static_cast<int>(p_.kv_heads));
    scanned_ = base;
  }

  // Goes to the item behind this one, if that belongs to the same request and KV head: a long prompt has many, and to
  // count them from the first one each time takes longer than some of their tiles.
  __device__ bool enter_item_behind() {
    if (units_ == 0) return false;  // there is no item yet
    const Request request = broadcast(mine_, lane_);
    for (unit_ = units_ = 0; units_ == 0; units_ = units_in(p_, plan_, tiles_, whole())) {
      first_row_ += plan_.tile_rows * plan_.row_tiles;
      if (first_row_ >= request.valid_rows * plan_.gqa_group.divisor) return false;
      tiles_ = tiles_of(p_, plan_, request, first_row_);
    }
    return true;
  }

  // Goes to the item of unit at_, which is no earlier on the line than the item before.
  __device__ void enter_item() {
    for (; base_ < p_.batch; base_ += kWarp) {
      if (base_ != scanned_) scan(base_, true);
      const unsigned found = __ballot_sync(kFullMask, before_ + upto_ > at_);
      if (found != 0) {
        lane_ = __ffs(found) - 1;
        return enter_item_of_lane();
      }
      before_ += __shfl_sync(kFullMask, upto_, kWarp - 1);
    }
    at_ = end_;  // happens only if lengths have changed since they were measured
  }
  __device__ void enter_item_of_lane() {
    const int units_of_head = __shfl_sync(kFullMask, units_of_mine_, lane_);
    int left = at_ - before_ - __shfl_sync(kFullMask, upto_, lane_) + units_of_head * static_cast<int>(p_.kv_heads);
    const Request request = broadcast(mine_, lane_);
    head_ = left / units_of_head;
    left -= head_ * units_of_head;
    for (first_row_ = 0;; first_row_ += plan_.tile_rows * plan_.row_tiles) {
      tiles_ = tiles_of(p_, plan_, request, first_row_);
      units_ = units_in(p_, plan_, tiles_, whole());
      if (left < units_) break;
      left -= units_;
    }
    unit_ = left;
  }

  const TreeAttentionParams& p_;
  const DevicePlan& plan_;
  CachedRequests& cached_requests_;
};

}  // namespace specdec::attention
