// The work line of wide row tiles, which merges in a second launch: workers leave for it what they have cut. Theirs is
// a walk of its own, since it holds more in registers, of which producers beside two warpgroups have 88.
#pragma once

#include "attention/work_line.cuh"

namespace specdec::wide {

// One worker's share of a group. The first part of a group is that of the worker's share which it begins in and lies at
// 2 worker + 1; the others follow at 2 (worker + 1), 2 (worker + 2) ...
struct Segment {
  Request request;
  int head;                  // KV head; -1: the worker's share is done
  int first_row;             // of all lanes' row tiles
  int first_tile, end_tile;  // KV tiles
  int part;                  // of the partial result among the workers', -1: the group is not cut, this is its result
  int parts;                 // of the whole group where this is its first, else 0
};

// At the start of the workspace: the first segment of each worker's last group where that goes on in the next worker's
// share, else parts is 0.
__device__ __forceinline__ Segment* cut_groups(const TreeAttentionParams& p) {
  return reinterpret_cast<Segment*>(p.workspace);
}
static_assert(sizeof(Segment) % 16 == 0);  // partial results lie behind them

// Behind the cut groups: for each part the sums [rows, D] that the maxima [rows] and sums of weights [rows] behind them
// belong to.
__device__ __forceinline__ float* part_of(const TreeAttentionParams& p, const Cut& cut, int64_t part, int D) {
  return reinterpret_cast<float*>(cut_groups(p) + cut.max_workers) + part * cut.rows * (D + 2);
}

// The line as one warp sees it; all its lanes call all of this together.
class WorkLine {
 public:
  __device__ WorkLine(const TreeAttentionParams& p, const Cut& cut) : p_(p), cut_(cut) {}

  // Reads the lengths; everything else is asked afterwards.
  __device__ void measure() {
    int total = 0, heads = 0, least = INT32_MAX, most = 0;  // units of all, heads that have some, units of a head
    scanned_ = -1;
    for (int base = 0; base < p_.batch; base += kWarp) {
      scan(base);
      total += __shfl_sync(kFullMask, upto_, kWarp - 1);
      heads += __popc(__ballot_sync(kFullMask, units_of_mine_ > 0)) * static_cast<int>(p_.kv_heads);
      if (units_of_mine_ > 0) least = min(least, units_of_mine_);
      most = max(most, units_of_mine_);
    }
    // A part costs about as much as a hundred rows of KV.
    const int few = max(128 / cut_.tile.divisor, 1);
    workers_ = min(cut_.max_workers, (total + few - 1) / few);
    if (workers_ == 0) return;
    // Of even lengths, shares that end where heads do leave less to be merged, or nothing.
    if (__reduce_min_sync(kFullMask, least) == __reduce_max_sync(kFullMask, most)) {
      const int each = (heads + workers_ - 1) / workers_;  // heads of a worker
      if (each == 1)
        workers_ -= workers_ % heads;
      else if (heads % each == 0 && heads / each * 16 >= workers_ * 15)
        workers_ = heads / each;
    }
    share_ = total / workers_;
    longer_ = total - share_ * workers_;
  }

  __device__ int workers() const { return workers_; }  // that have work

  // Goes to the begin of a worker's share.
  __device__ void seek(int worker) {
    worker_ = worker;
    at_ = begin(worker);
    end_ = begin(worker + 1);
    int left = at_;
    for (int base = 0; base < p_.batch; base += kWarp) {
      if (base != scanned_) scan(base);
      const unsigned found = __ballot_sync(kFullMask, upto_ > left);
      if (found != 0) {
        const int lane = __ffs(found) - 1;
        if (lane > 0) left -= __shfl_sync(kFullMask, upto_, lane - 1);
        enter(base + lane);
        head_ = left / units_of_head_;
        left -= head_ * units_of_head_;
        for (first_row_ = 0;; first_row_ += rows_of_block()) {
          tiles_ = tiles_of(p_, cut_, request_, first_row_);
          const int units = units_in(tiles_);
          if (left < units) break;
          left -= units;
        }
        unit_ = left;
        return;
      }
      left -= __shfl_sync(kFullMask, upto_, kWarp - 1);
    }
  }

  // The next segment of the share.
  __device__ Segment next() {
    Segment s;
    s.head = -1;
    s.parts = 0;
    if (at_ >= end_) return s;
    const int units = units_in(tiles_), count = min(end_ - at_, units - unit_);
    s.request = request_;
    s.head = head_;
    s.first_row = first_row_;
    s.first_tile = tiles_.first + unit_;
    s.end_tile = s.first_tile + count;
    s.part = count == units ? -1 : 2 * worker_ + (unit_ == 0);
    s.parts = count == units || unit_ > 0 ? 0 : worker_of(at_ + units - 1) - worker_ + 1;
    at_ += count;
    unit_ += count;
    if (unit_ == units && at_ < end_) next_group();
    return s;
  }

 private:
  __device__ int rows_of_block() const { return cut_.rows * cut_.lanes; }
  __device__ int units_in(Tiles tiles) const { return specdec::units_in(p_, cut_, tiles); }

  // The first `longer_` shares have one unit more than the others.
  __device__ int begin(int worker) const { return share_ * worker + min(longer_, worker); }
  __device__ int worker_of(int unit) const {
    const int behind = unit - longer_ * (share_ + 1);
    return behind < 0 ? unit / (share_ + 1) : longer_ + behind / share_;
  }

  // Each lane takes request base + lane: upto_ becomes the units of it and of the lanes before it.
  __device__ void scan(int base) {
    const int lane = threadIdx.x % kWarp;
    mine_ = Request{};
    units_of_mine_ = 0;
    if (base + lane < p_.batch) {
      mine_ = request_of(p_, base + lane);
      units_of_mine_ = units_of(p_, cut_, mine_);
    }
    upto_ = sum_up_to_lane(units_of_mine_ * static_cast<int>(p_.kv_heads));
    scanned_ = base;
  }

  __device__ void enter(int b) {
    b_ = b;
    if (b / kWarp * kWarp != scanned_) scan(b / kWarp * kWarp);
    request_ = broadcast(mine_, b % kWarp);
    units_of_head_ = __shfl_sync(kFullMask, units_of_mine_, b % kWarp);
  }

  // To the next group with something to do; there is one.
  __device__ void next_group() {
    unit_ = 0;
    do {
      first_row_ += rows_of_block();
      if (first_row_ >= request_.valid_rows * cut_.group.divisor) {
        first_row_ = 0;
        if (++head_ == p_.kv_heads) {
          head_ = 0;
          do enter(b_ + 1);
          while (units_of_head_ == 0);
        }
      }
      tiles_ = tiles_of(p_, cut_, request_, first_row_);
    } while (units_in(tiles_) == 0);
  }

  const TreeAttentionParams& p_;
  const Cut& cut_;
  // Of this lane, from the last scan.
  Request mine_;
  int units_of_mine_ = 0, upto_ = 0, scanned_ = -1;

  int workers_ = 0, share_ = 0, longer_ = 0;

  // Where the walk is.
  int worker_ = 0;
  int at_ = 0, end_ = 0;  // units of the line
  int b_ = 0;
  Request request_;
  int units_of_head_ = 0, head_ = 0, first_row_ = 0;
  Tiles tiles_{};
  int unit_ = 0;  // of the group
};

}  // namespace specdec::wide
