// How the work of one call is cut into even parts, by each block for itself and from lengths that only the device
// knows. All work lies on one line: request after request, KV head after head, block of query rows after block, tile of
// KV after tile. Of n workers, worker w does [w N / n, (w + 1) N / n). A worker so meets at most two groups (request,
// head, block of rows) that it does not do alone, its first and its last one, and leaves at most two partial results:
// their space depends on neither batch nor lengths. Where groups differ little from a share, none is cut.
#pragma once

#include <cutlass/fast_math.h>

#include "attention/visibility.h"
#include "core/cuda.cuh"
#include "core/prefetch.cuh"
#include "core/warp_scan.cuh"

namespace specdec {

constexpr int kMaxWorkers = 512;  // two for each multiprocessor, of which no device has so many

// KV rows from which on a cluster takes longer for them than some of them do with a merge.
constexpr int kWorthSharing = 2304;

// What is static about the cut, chosen on the host.
struct Cut {
  int rows;    // of a row tile: what one block computes at a time; row n is query row n / G, head n % G of its group
  int lanes;   // blocks of a worker: neighbours that walk the same KV in step, each with its own row tile
  int blocks;  // on a multiprocessor at once
  int max_workers;                // that can run at once, up to kMaxWorkers
  int cluster;                    // blocks of a cluster, where each has a request and KV head of its own; else 0
  bool whole;                     // workers take whole groups in turn, and nothing is cut
  bool two_groups;                // warpgroups of a block share its tiles, where a kernel has the choice
  cutlass::FastDivmod tile;       // divides by the KV rows of a tile
  cutlass::FastDivmod group;      // by G = q_heads / kv_heads
  cutlass::FastDivmod split;      // by the tiles of a split: 1, or with fixed_split what it says
  cutlass::FastDivmod page_size;  // by the rows of a page
  int parts;                      // clusters that share a row tile where its KV is long; 1: none does
};

// Where row n of all the rows of a request and KV head is.
struct QueryRow {
  int row;   // of the request
  int head;  // of all query heads
};
__device__ __forceinline__ QueryRow query_row(const Cut& cut, int head, int n) {
  QueryRow at;
  cut.group(at.row, at.head, n);
  at.head += head * cut.group.divisor;
  return at;
}

// One worker's share of a group, or with fixed_split one split of it. The first part of a group is that of the worker
// whose share it begins in and lies at 2 worker + 1; the others follow at 2 (worker + 1), 2 (worker + 2) ...; or with
// fixed_split each at its unit.
struct Segment {
  Request request;
  int head;                  // KV head; -1: the worker's share is done
  int first_row;             // of all lanes' row tiles
  int first_tile, end_tile;  // KV tiles
  int parts;                 // of the group; 1: it is not cut
  int part, first_part;      // where this one and the group's first are, among all partial results
  int workers, place;        // that have parts of the group, and which of them this one is
  bool last;                 // of the worker's parts of the group
  bool merge;                // not to be summed: the group's parts are to be merged
};

// KV rows [begin, end).
struct Span {
  int begin, end;
};

// Those that some of `count` query rows from `first_row` on, of which there is one at least, may see.
__device__ __forceinline__ Span span_of(const TreeAttentionParams& p, const Cut& cut, const Request& r, int first_row,
                                        int count) {
  if (p.mask != nullptr && p.window == INT64_MAX) return {0, r.end};
  const int end_row = min(first_row + count, r.valid_rows * cut.group.divisor);
  const int begin = visible_begin(p, r, cut.group.div(first_row));
  return {begin, max(begin, visible_end(p, r, cut.group.div(end_row - 1)))};
}

struct Tiles {
  int first, end;
};

__device__ __forceinline__ Tiles tiles_of(const TreeAttentionParams& p, const Cut& cut, const Request& r,
                                          int first_row) {
  const Span span = span_of(p, cut, r, first_row, cut.rows * cut.lanes);
  const int first = cut.tile.div(span.begin);
  return {first, span.begin == span.end ? first : cut.tile.div(span.end - 1) + 1};
}

// Of units that have to be done for these tiles: tiles, with fixed_split splits, or one where groups are whole.
__device__ __forceinline__ int units_in(const TreeAttentionParams& p, const Cut& cut, Tiles tiles, bool whole) {
  if (tiles.end == tiles.first) return 0;
  if (whole) return 1;
  return cut.split.div(tiles.end - 1) - cut.split.div(tiles.first) + 1;
}

// Of one head of a request.
__device__ __forceinline__ int units_of(const TreeAttentionParams& p, const Cut& cut, const Request& r, bool whole) {
  const int end = r.valid_rows * cut.group.divisor;
  int units = 0;
  for (int row = 0; row < end; row += cut.rows * cut.lanes) units += units_in(p, cut, tiles_of(p, cut, r, row), whole);
  return units;
}

// What all lanes know when one of them knew it.
template <class T>
__device__ __forceinline__ T broadcast(const T& x, int lane) {
  static_assert(sizeof(T) % 4 == 0);
  T y;
#pragma unroll
  for (size_t i = 0; i < sizeof(T) / 4; ++i)
    reinterpret_cast<int*>(&y)[i] = __shfl_sync(kFullMask, reinterpret_cast<const int*>(&x)[i], lane);
  return y;
}

// Requests of this lane, of the first scans: lane l has l, l + 32, ... They are read once.
constexpr int kKnownRequests = 4;
using KnownRequests = Request[kKnownRequests];

// KV rows that a worker may have more than an even share, for each block of its multiprocessor: what leaving parts and
// merging them costs instead.
constexpr int kWorthCutting = 28 * 64;

// What a walk knows, to be kept while it rests.
class WalkState {
 protected:
  // Of this lane, from the last scan.
  Request mine_{};
  int units_of_mine_ = 0, upto_ = 0, scanned_ = -1;

  int workers_ = 0, total_ = 0;  // and units of all: workers_ share_ + longer_
  int share_ = 0, longer_ = 0;
  bool whole_ = false;  // groups, which are the units then

  // Where the walk is.
  int worker_ = 0;
  int at_ = 0, end_ = 0;       // units of the line
  int base_ = 0, before_ = 0;  // requests of the last scan, units before them
  int lane_ = 0;               // whose request it is
  int head_ = 0, first_row_ = 0;
  Tiles tiles_{};
  int unit_ = 0, units_ = 0;  // of the group

  // Of next_of().
  bool waited_ = false, known_ = false, cut_some_ = false, merging_ = false;
};

// What a worker has to do where groups are whole, and of no more rows than its lanes have: every max_workers-th of
// them, as far as there is KV to be read. No lengths are read but those of its own groups.
class WholeGroups {
 public:
  // The next one; head -1: there is none. The first call waits for the kernels before; what it is likely to read, and
  // the code that does, comes while they run. By a warp, all lanes together.
  __device__ __forceinline__ Segment next_of(const TreeAttentionParams& p, const Cut& cut, int worker) {
    const unsigned heads = static_cast<unsigned>(p.kv_heads);
    bool known = group_ >= 0;
    if (!known) group_ = worker;
    Segment s;
#pragma unroll 1
    while (true) {  // written once: code has to be fetched too
      s.head = -1;
      s.first_row = s.first_tile = s.end_tile = 0;
      const unsigned b = static_cast<unsigned>(group_) / heads;
      if (b < p.batch) {
        s.request = request_of(p, b);
        s.head = static_cast<int>(static_cast<unsigned>(group_) - b * heads);
        if (s.request.valid_rows > 0) {
          const Tiles tiles = tiles_of(p, cut, s.request, 0);
          s.first_tile = tiles.first;
          s.end_tile = tiles.end;
        }
      }
      if (!known) {
        if (s.first_tile < s.end_tile)
          prefetch(p.rows.page_table + s.request.slot * p.rows.max_pages +
                   cut.page_size.div(s.first_tile * cut.tile.divisor));
        wait_for_kernels_before();
        let_next_kernel_start();
        known = true;
        continue;
      }
      if (s.head < 0) return s;
      group_ += cut.max_workers;
      if (s.first_tile == s.end_tile) continue;
      s.parts = s.workers = 1;
      s.part = s.first_part = s.place = 0;
      s.last = true;
      s.merge = false;
      return s;
    }
  }

 private:
  int group_ = -1;
};

// The line as one warp sees it; all its lanes call all of this together. Where registers are short, groups are not left
// whole.
template <bool kMayBeWhole>
class WorkLine : public WalkState {
 public:
  __device__ WorkLine(const TreeAttentionParams& p, const Cut& cut, const WalkState& state, KnownRequests& known)
      : WalkState(state), p_(p), cut_(cut), known_requests_(known) {}

  // What a worker has to do next: the segments of its share, behind them those to be merged, and at last one of head
  // -1. The first call waits for the kernels before. The walk is made while they may still change what it reads: in a
  // chain of calls they rarely do, and then it has not to be made again. All of it is written once: code has to be
  // fetched too.
  __device__ __forceinline__ Segment next_of(int worker) {
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
      if (s.head < 0 && cut_some_ && !merging_) {
        merging_ = true;  // which comes when all of the share is done
        seek(worker);
        continue;
      }
      cut_some_ |= s.head >= 0 && s.parts > 1;
      s.merge = merging_;
      if (!merging_ || s.head < 0 || (s.parts > 1 && s.last)) return s;
    }
  }

 private:
  // Reads the lengths; everything else is asked afterwards. Where groups turn out to be whole, all are counted again.
  __device__ void measure() {
    whole_ = false;
#pragma unroll 1
    while (true) {
      int heads = 0, least = INT32_MAX, most = 0;  // that have units, units of one
      total_ = 0;
      scanned_ = -1;
      for (int base = 0; base < p_.batch; base += kWarp) {
        scan(base, whole());
        total_ += __shfl_sync(kFullMask, upto_, kWarp - 1);
        heads += __popc(__ballot_sync(kFullMask, units_of_mine_ > 0)) * static_cast<int>(p_.kv_heads);
        if (units_of_mine_ > 0) least = min(least, units_of_mine_);
        most = max(most, units_of_mine_);
      }
      workers_ = min(cut_.max_workers, total_);
      if (workers_ == 0) return;
      least = __reduce_min_sync(kFullMask, least);
      most = __reduce_max_sync(kFullMask, most);
      const int enough = total_ / workers_ + cut_.split.div(cut_.tile.div(kWorthCutting * cut_.blocks));
      if (least == most) {
        // Shares that end where heads do leave less to be merged, or nothing.
        const int each = (heads + workers_ - 1) / workers_;  // heads of a worker
        const int fewer = each == 1 ? workers_ - workers_ % heads : heads % each == 0 ? heads / each : 0;
        if (fewer > 0 && (fewer * 16 >= workers_ * 15 || total_ / fewer <= enough)) workers_ = fewer;
      } else if (kMayBeWhole && !whole_ && !p_.fixed_split && heads <= workers_ && most <= enough) {
        whole_ = true;
        continue;
      }
      break;
    }
    share_ = total_ / workers_;
    longer_ = total_ - share_ * workers_;
  }
  __device__ bool whole() const { return kMayBeWhole && whole_; }

  // Whether the lengths are still those that measure() has read; true only if so.
  __device__ bool holds() const {
    if (p_.batch > kKnownRequests * kWarp) return false;
    bool same = true;
#pragma unroll 1
    for (int b = threadIdx.x % kWarp; b < p_.batch; b += kWarp) same &= request_of(p_, b) == known_requests_[b / kWarp];
    return __all_sync(kFullMask, same);
  }

  // Goes to the begin of a worker's share; one that has no work has none.
  __device__ void seek(int worker) {
    worker_ = worker;
    at_ = worker < workers_ ? begin(worker) : 0;
    end_ = worker < workers_ ? begin(worker + 1) : 0;
    base_ = before_ = unit_ = units_ = 0;
  }

  // The next segment of the share.
  __device__ Segment next() {
    if (at_ < end_ && unit_ == units_) enter_group();
    Segment s;
    s.head = -1;
    if (at_ >= end_) return s;
    const int split = cut_.split.divisor, first = cut_.split.div(tiles_.first);
    const int count = p_.fixed_split ? 1 : min(end_ - at_, units_ - unit_);
    s.request = broadcast(mine_, lane_);
    s.head = head_;
    s.first_row = first_row_;
    s.first_tile = max((first + unit_) * split, tiles_.first);
    s.end_tile = whole() ? tiles_.end : min((first + unit_ + count) * split, tiles_.end);
    find_parts(s, count);
    s.merge = false;
    at_ += count;
    unit_ += count;
    return s;
  }

  __device__ void find_parts(Segment& s, int count) const {
    s.parts = s.workers = 1;
    s.part = s.first_part = s.place = 0;
    s.last = unit_ + count == units_ || at_ + count == end_;
    if (count == units_) return;
    const int begin = at_ - unit_, first_worker = worker_of(begin);
    s.workers = worker_of(begin + units_ - 1) - first_worker + 1;
    s.place = worker_ - first_worker;
    s.parts = p_.fixed_split ? units_ : s.workers;
    s.part = p_.fixed_split ? at_ : 2 * worker_ + (unit_ == 0);
    s.first_part = p_.fixed_split ? begin : 2 * first_worker + 1;
  }

  __device__ int begin(int worker) const { return share_ * worker + longer_ * worker / workers_; }
  __device__ int worker_of(int unit) const {
    const int near =
        static_cast<int>(static_cast<float>(unit) / static_cast<float>(total_) * workers_);  // or beside it
    return near + (begin(near + 1) <= unit) - (begin(near) > unit);
  }

  // Each lane takes request base + lane: upto_ becomes the units of it and of the lanes before it.
  __device__ void scan(int base, bool again) {
    const int b = base + static_cast<int>(threadIdx.x) % kWarp, n = base / kWarp;
    mine_ = Request{};
    units_of_mine_ = 0;
    if (b < p_.batch) {
      mine_ = again && n < kKnownRequests ? known_requests_[n] : request_of(p_, b);
      if (n < kKnownRequests) known_requests_[n] = mine_;
      units_of_mine_ = units_of(p_, cut_, mine_, whole());
    }
    upto_ = sum_up_to_lane(units_of_mine_ * static_cast<int>(p_.kv_heads));
    scanned_ = base;
  }

  // Goes to the group of unit at_, which is no earlier on the line than the one before.
  __device__ void enter_group() {
    for (; base_ < p_.batch; base_ += kWarp) {
      if (base_ != scanned_) scan(base_, true);
      const unsigned found = __ballot_sync(kFullMask, before_ + upto_ > at_);
      if (found != 0) {
        lane_ = __ffs(found) - 1;
        return enter_group_of_lane();
      }
      before_ += __shfl_sync(kFullMask, upto_, kWarp - 1);
    }
    at_ = end_;  // only if lengths have changed since they were measured
  }
  __device__ void enter_group_of_lane() {
    const int units_of_head = __shfl_sync(kFullMask, units_of_mine_, lane_);
    int left = at_ - before_ - __shfl_sync(kFullMask, upto_, lane_) + units_of_head * static_cast<int>(p_.kv_heads);
    const Request request = broadcast(mine_, lane_);
    head_ = left / units_of_head;
    left -= head_ * units_of_head;
    for (first_row_ = 0;; first_row_ += cut_.rows * cut_.lanes) {
      tiles_ = tiles_of(p_, cut_, request, first_row_);
      units_ = units_in(p_, cut_, tiles_, whole());
      if (left < units_) break;
      left -= units_;
    }
    unit_ = left;
  }

  const TreeAttentionParams& p_;
  const Cut& cut_;
  KnownRequests& known_requests_;
};

}  // namespace specdec
