// Stream-K decomposition of one call (Osama et al., arXiv 2301.03598): every block computes its own even share of the
// work, from lengths that only the device knows.
//
// A work item is a request, a KV head and up to plan.row_tiles row tiles; its KV is a number of tiles. All tiles of all
// items form one linear order: by request, KV head, item, tile. With n workers and N units in total, worker w does
// units [w N / n, (w + 1) N / n). So a worker has at most two items that it does not do alone, the first and the last
// of its share, and leaves at most two partial results: the workspace size depends on neither batch nor lengths. If
// items differ little from a share in size, none of them is split.
//
// Reads: lengths (prefix_lens, slots, q_lens, cu_seqlens_q, status). Writes nothing.
#pragma once

#include "attention/common/device_plan.cuh"
#include "attention/common/visibility.h"
#include "core/cuda.cuh"
#include "core/warp.cuh"

namespace specdec::attention {

// The part of a work item that one worker does at a time: the item's units within the worker's share, or with
// fixed_split one split of the item.
//
// Partial results of an item are numbered in the order of its KV: the first one, from the worker in whose share the
// item begins, is 2 worker + 1; the following ones are 2 (worker + 1), 2 (worker + 2), ... With fixed_split each has
// the number of its unit.
struct Segment {
  Request request;
  int kv_head;                 // -1: the worker has nothing left to do
  int first_row;               // of the item
  int first_tile, end_tile;    // range of KV tiles
  int splits;                  // partial results of the item; 1: the item is not split
  int partial, first_partial;  // number of the partial result of this segment, and of the item's first
  int workers, rank;           // number of workers on the item, and this worker's rank among them
  bool last;                   // the worker's last segment of the item
  bool merge;                  // no KV to read: merge the item's partial results instead
};

// Tokens [begin, end).
struct Span {
  int begin, end;
};

// Return the tokens visible to some of the `count` query rows from `first_row` on. At least one must exist.
__device__ __forceinline__ Span span_of(const AttentionCall& p, const DevicePlan& plan, const Request& r, int first_row,
                                        int count) {
  if (p.mask != nullptr && p.window == INT64_MAX) return {0, r.end};
  const int end_row = min(first_row + count, r.valid_rows * plan.gqa_group.divisor);
  const int begin = visible_begin(p, r, plan.gqa_group.div(first_row));
  return {begin, max(begin, visible_end(p, r, plan.gqa_group.div(end_row - 1)))};
}

struct Tiles {
  int first, end;
};

__device__ __forceinline__ Tiles tiles_of(const AttentionCall& p, const DevicePlan& plan, const Request& r,
                                          int first_row) {
  const Span span = span_of(p, plan, r, first_row, plan.tile_rows * plan.row_tiles);
  const int first = plan.tile_tokens.div(span.begin);
  return {first, span.begin == span.end ? first : plan.tile_tokens.div(span.end - 1) + 1};
}

// Return the number of work units in these tiles: one per tile; with fixed_split one per split; one in all if items are
// whole.
__device__ __forceinline__ int units_in(const AttentionCall& p, const DevicePlan& plan, Tiles tiles, bool whole) {
  if (tiles.end == tiles.first) return 0;
  if (whole) return 1;
  return plan.split_tiles.div(tiles.end - 1) - plan.split_tiles.div(tiles.first) + 1;
}

// Return the units of one KV head of a request.
__device__ __forceinline__ int units_of(const AttentionCall& p, const DevicePlan& plan, const Request& r, bool whole) {
  const int end = r.valid_rows * plan.gqa_group.divisor;
  int units = 0;
  for (int row = 0; row < end; row += plan.tile_rows * plan.row_tiles)
    units += units_in(p, plan, tiles_of(p, plan, r, row), whole);
  return units;
}

// Broadcast a value of lane `lane` to all lanes of the warp.
template <class T>
__device__ __forceinline__ T broadcast(const T& x, int lane) {
  static_assert(sizeof(T) % 4 == 0);
  T y;
#pragma unroll
  for (size_t i = 0; i < sizeof(T) / 4; ++i)
    reinterpret_cast<int*>(&y)[i] = __shfl_sync(kFullMask, reinterpret_cast<const int*>(&x)[i], lane);
  return y;
}

// Requests that a lane caches: lane l holds requests l, l + 32, ... so that each is read once.
constexpr int kCachedRequests = 4;
using CachedRequests = Request[kCachedRequests];

// Tokens that a worker may have beyond an even share, per block on its SM, before splitting pays off: storing and
// merging partial results costs as much.
constexpr int kSplitCostTokens = 28 * 64;

// Reduce the workers that share `total` units of `heads` KV heads, which have equally many, to those whose shares end
// where KV heads end: these leave less to merge, or nothing. It is done if nearly all workers remain, or if no share
// exceeds max_share units.
__device__ __forceinline__ void end_shares_at_heads(int& workers, int total, int heads, int max_share) {
  const int each = (heads + workers - 1) / workers;  // KV heads of a worker
  const int fewer = each == 1 ? workers - workers % heads : heads % each == 0 ? heads / each : 0;
  if (fewer > 0 && (fewer * 16 >= workers * 15 || total / fewer <= max_share)) workers = fewer;
}

// How far next_segment_of() is.
struct WalkProgress {
  bool waited = false, counted = false, has_splits = false, merging = false;
};

// Return the next segment of a walk over a stream-K share: first those of the worker's share, then the items to merge,
// finally one with kv_head -1. Call from all lanes of a warp.
//
// The first call waits for the preceding kernels. It walks while they may still change the lengths, and walks again
// after the wait only if they did: in a chain of calls they rarely do. It is one loop, to fetch less code.
//
// A walk reads the lengths and divides the units among the workers (count_units), moves to the beginning of a worker's
// share (seek), returns the next segment of it, or one with kv_head -1 (next), and says whether the lengths are still
// those that it has counted (lengths_unchanged). `call` is what it takes of the call.
template <class Walk, class... Call>
__device__ __forceinline__ Segment next_segment_of(Walk& walk, WalkProgress& progress, int worker,
                                                   const Call&... call) {
#pragma unroll 1
  while (true) {
    if (!progress.counted) {
      walk.count_units(call...);
      walk.seek(worker);
    }
    Segment s = walk.next(call...);
    if (!progress.waited) {
      wait_for_kernels_before();
      let_next_kernel_start();
      progress.waited = true;
      if (!walk.lengths_unchanged(call...)) continue;
    }
    progress.counted = true;
    if (s.kv_head < 0 && progress.has_splits && !progress.merging) {
      progress.merging = true;  // merging begins when the whole share is done
      walk.seek(worker);
      continue;
    }
    progress.has_splits |= s.kv_head >= 0 && s.splits > 1;
    s.merge = progress.merging;
    if (!progress.merging || s.kv_head < 0 || (s.splits > 1 && s.last)) return s;
  }
}

// State of a stream-K walk, kept between its steps.
class StreamKState {
 protected:
  // This lane's request of the last scan, its units per KV head, and the inclusive prefix sum of units over the lanes.
  Request lane_request_{};
  int lane_units_ = 0, prefix_units_ = 0, scanned_base_ = -1;

  int workers_ = 0, total_ = 0;  // total_ = workers_ units_per_worker_ + remainder_, in units
  int units_per_worker_ = 0, remainder_ = 0;
  bool whole_ = false;  // items are not split: each is one unit

  // Position of the walk.
  int worker_ = 0;
  int at_ = 0, end_ = 0;             // units in the linear order
  int base_ = 0, units_before_ = 0;  // first request of the last scan, and the units before it
  int lane_ = 0;                     // lane whose request the walk is in
  int head_ = 0, first_row_ = 0;
  Tiles tiles_{};
  int unit_ = 0, units_ = 0;  // within the item

  WalkProgress progress_;
};

// Walk of a worker that takes whole items: every plan.workers-th item that has KV, each of at most plan.row_tiles row
// tiles. Reads the lengths of its own items only.
class WholeItems {
 public:
  // Return the next segment, or one with kv_head -1 at the end. The first call waits for the preceding kernels; while
  // they run, it prefetches what it will probably read, and its own code. Call from all lanes of a warp.
  __device__ __forceinline__ Segment next_segment(const AttentionCall& p, const DevicePlan& plan, int worker) {
    const unsigned heads = static_cast<unsigned>(p.kv_heads);
    bool waited = item_ >= 0;
    if (!waited) item_ = worker;
    Segment s;
#pragma unroll 1
    while (true) {  // one loop for both passes, to fetch less code
      s.kv_head = -1;
      s.first_row = s.first_tile = s.end_tile = 0;
      const unsigned b = static_cast<unsigned>(item_) / heads;
      if (b < p.batch) {
        s.request = load_request(p, b);
        s.kv_head = static_cast<int>(static_cast<unsigned>(item_) - b * heads);
        if (s.request.valid_rows > 0) {
          const Tiles tiles = tiles_of(p, plan, s.request, 0);
          s.first_tile = tiles.first;
          s.end_tile = tiles.end;
        }
      }
      if (!waited) {
        if (s.first_tile < s.end_tile)
          prefetch(p.rows.page_table + s.request.slot * p.rows.max_pages +
                   plan.page_size.div(s.first_tile * plan.tile_tokens.divisor));
        wait_for_kernels_before();
        let_next_kernel_start();
        waited = true;
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

// Walk of a worker that takes its stream-K share. All methods are called by all lanes of a warp. If registers are
// scarce, kAllowWhole is false: then lengths cannot decide to keep items whole.
template <bool kAllowWhole>
class StreamK : public StreamKState {
 public:
  __device__ StreamK(const AttentionCall& p, const DevicePlan& plan, const StreamKState& state,
                     CachedRequests& cached_requests)
      : StreamKState(state), p_(p), plan_(plan), cached_requests_(cached_requests) {}

  // Return the next segment; see next_segment_of.
  __device__ __forceinline__ Segment next_segment(int worker) { return next_segment_of(*this, progress_, worker); }

  // The steps of next_segment_of().

  // Read the lengths and divide the units among the workers. If the lengths decide that items stay whole, count again.
  __device__ void count_units() {
    whole_ = false;
#pragma unroll 1
    while (true) {
      int heads = 0, min_units = INT32_MAX, max_units = 0;  // KV heads that have units; units per KV head
      total_ = 0;
      scanned_base_ = -1;
      for (int base = 0; base < p_.batch; base += kWarp) {
        scan(base, whole());
        total_ += __shfl_sync(kFullMask, prefix_units_, kWarp - 1);
        heads += __popc(__ballot_sync(kFullMask, lane_units_ > 0)) * static_cast<int>(p_.kv_heads);
        if (lane_units_ > 0) min_units = min(min_units, lane_units_);
        max_units = max(max_units, lane_units_);
      }
      workers_ = min(plan_.workers, total_);
      if (workers_ == 0) return;
      min_units = __reduce_min_sync(kFullMask, min_units);
      max_units = __reduce_max_sync(kFullMask, max_units);
      const int max_share =
          total_ / workers_ + plan_.split_tiles.div(plan_.tile_tokens.div(kSplitCostTokens * plan_.blocks_per_sm));
      if (min_units == max_units) {
        end_shares_at_heads(workers_, total_, heads, max_share);
      } else if (kAllowWhole && !whole_ && !p_.fixed_split && heads <= workers_ && max_units <= max_share) {
        whole_ = true;
        continue;
      }
      break;
    }
    units_per_worker_ = total_ / workers_;
    remainder_ = total_ - units_per_worker_ * workers_;
  }

  // Return whether the lengths are still those that count_units() read. May return false even if they are.
  __device__ bool lengths_unchanged() const {
    if (p_.batch > kCachedRequests * kWarp) return false;
    bool same = true;
#pragma unroll 1
    for (int b = threadIdx.x % kWarp; b < p_.batch; b += kWarp)
      same &= load_request(p_, b) == cached_requests_[b / kWarp];
    return __all_sync(kFullMask, same);
  }

  // Move to the beginning of a worker's share, which is empty for a worker without work.
  __device__ void seek(int worker) {
    worker_ = worker;
    at_ = worker < workers_ ? begin(worker) : 0;
    end_ = worker < workers_ ? begin(worker + 1) : 0;
    base_ = units_before_ = unit_ = units_ = 0;
  }

  // Return the next segment of the share, or one with kv_head -1.
  __device__ Segment next() {
    if (at_ < end_ && unit_ == units_ && !enter_next_item()) enter_item();
    Segment s;
    s.kv_head = -1;
    if (at_ >= end_) return s;
    const int split = plan_.split_tiles.divisor, first = plan_.split_tiles.div(tiles_.first);
    const int count = p_.fixed_split ? 1 : min(end_ - at_, units_ - unit_);
    s.request = broadcast(lane_request_, lane_);
    s.kv_head = head_;
    s.first_row = first_row_;
    s.first_tile = max((first + unit_) * split, tiles_.first);
    s.end_tile = whole() ? tiles_.end : min((first + unit_ + count) * split, tiles_.end);
    assign_partials(s, count);
    s.merge = false;
    at_ += count;
    unit_ += count;
    return s;
  }

 private:
  __device__ bool whole() const { return kAllowWhole && whole_; }

  __device__ void assign_partials(Segment& s, int count) const {
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

  __device__ int begin(int worker) const { return units_per_worker_ * worker + remainder_ * worker / workers_; }
  __device__ int worker_of(int unit) const {
    // Exact, or off by one.
    const int near = static_cast<int>(static_cast<float>(unit) / static_cast<float>(total_) * workers_);
    return near + (begin(near + 1) <= unit) - (begin(near) > unit);
  }

  // Assign request base + l to lane l, and compute prefix_units_ over the lanes.
  __device__ void scan(int base, bool reuse_cached) {
    const int b = base + static_cast<int>(threadIdx.x) % kWarp, n = base / kWarp;
    lane_request_ = Request{};
    lane_units_ = 0;
    if (b < p_.batch) {
      lane_request_ = reuse_cached && n < kCachedRequests ? cached_requests_[n] : load_request(p_, b);
      if (n < kCachedRequests) cached_requests_[n] = lane_request_;
      lane_units_ = units_of(p_, plan_, lane_request_, whole());
    }
    prefix_units_ = sum_up_to_lane(lane_units_ * static_cast<int>(p_.kv_heads));
    scanned_base_ = base;
  }

  // Move to the next item if it belongs to the same request and KV head. A long prompt has many items, and counting
  // them from the first each time takes longer than some of their tiles.
  __device__ bool enter_next_item() {
    if (units_ == 0) return false;  // no item has been entered yet
    const Request request = broadcast(lane_request_, lane_);
    for (unit_ = units_ = 0; units_ == 0; units_ = units_in(p_, plan_, tiles_, whole())) {
      first_row_ += plan_.tile_rows * plan_.row_tiles;
      if (first_row_ >= request.valid_rows * plan_.gqa_group.divisor) return false;
      tiles_ = tiles_of(p_, plan_, request, first_row_);
    }
    return true;
  }

  // Move to the item that contains unit at_, which is not before the current item.
  __device__ void enter_item() {
    for (; base_ < p_.batch; base_ += kWarp) {
      if (base_ != scanned_base_) scan(base_, true);
      const unsigned found = __ballot_sync(kFullMask, units_before_ + prefix_units_ > at_);
      if (found != 0) {
        lane_ = __ffs(found) - 1;
        return enter_item_of_lane();
      }
      units_before_ += __shfl_sync(kFullMask, prefix_units_, kWarp - 1);
    }
    at_ = end_;  // reached only if the lengths have changed since they were counted
  }
  __device__ void enter_item_of_lane() {
    const int units_of_head = __shfl_sync(kFullMask, lane_units_, lane_);
    int left = at_ - units_before_ - __shfl_sync(kFullMask, prefix_units_, lane_) +
               units_of_head * static_cast<int>(p_.kv_heads);
    const Request request = broadcast(lane_request_, lane_);
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

  const AttentionCall& p_;
  const DevicePlan& plan_;
  CachedRequests& cached_requests_;
};

}  // namespace specdec::attention
