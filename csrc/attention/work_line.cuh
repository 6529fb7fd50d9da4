// How the work of one call is cut into even parts, by each block for itself and from lengths that only the device
// knows. All work lies on one line: request after request, KV head after head, block of query rows after block, tile of
// KV after tile. Of n workers, worker w does [w N / n, (w + 1) N / n). A worker so meets at most two groups (request,
// head, block of rows) that it does not do alone, its first and its last one, and leaves at most two partial results:
// their space depends on neither batch nor lengths.
#pragma once

#include "attention/visibility.h"
#include "core/cuda.cuh"

namespace specdec {

// What is static about the cut, chosen on the host.
struct Cut {
  int rows;         // of a row tile: what one block computes at a time; row n is query row n / G, head n % G of its group
  int lanes;        // blocks of a worker: neighbours that walk the same KV in step, each with its own row tile
  int tile;         // KV rows of a tile
  int unit;         // tiles of a unit, the smallest part of the line: 1, or with fixed_split those of a split
  int max_workers;  // that can run at once
};

// One worker's share of a group.
struct Segment {
  Request request;
  int head;                  // KV head; -1: the worker's share is done
  int first_row;             // of all lanes' row tiles
  int first_tile, end_tile;  // KV tiles
  int part;                  // of the partial result among the workers', -1: the group is not cut, this is its result
};

SD_HD int ceil_div(int a, int b) { return (a + b - 1) / b; }
SD_HD int group_size(const TreeAttentionParams& p) { return static_cast<int>(p.q_heads) / static_cast<int>(p.kv_heads); }

struct Tiles {
  int first, end;
};

// Of the KV rows that some of the query rows from `first_row` on may see.
__device__ __forceinline__ Tiles tiles_of(const TreeAttentionParams& p, const Cut& cut, const Request& r, int first_row) {
  const int G = group_size(p), end_row = min(first_row + cut.rows * cut.lanes, static_cast<int>(r.valid_rows) * G);
  const int end = static_cast<int>(visible_end(p, r, (end_row - 1) / G));
  const int begin = static_cast<int>(visible_begin(p, r, first_row / G));
  return {begin / cut.tile, end > begin ? ceil_div(end, cut.tile) : begin / cut.tile};
}

__device__ __forceinline__ int units_between(const Cut& cut, Tiles tiles) {
  return tiles.end > tiles.first ? ceil_div(tiles.end, cut.unit) - tiles.first / cut.unit : 0;
}

// The line as one warp sees it; all its lanes call all of this together.
class WorkLine {
 public:
  __device__ WorkLine(const TreeAttentionParams& p, const Cut& cut) : p_(p), cut_(cut) {
    for (int base = 0; base < p.batch; base += kWarp) {
      scan(base);
      total_ += __shfl_sync(kFullMask, upto_, kWarp - 1);
    }
    workers_ = static_cast<int>(min(static_cast<int64_t>(cut.max_workers), total_));
  }

  __device__ int workers() const { return workers_; }  // that have work
  __device__ int64_t begin(int worker) const { return total_ * worker / workers_; }
  __device__ int worker_of(int64_t unit) const { return static_cast<int>(((unit + 1) * workers_ - 1) / total_); }

  // Goes to the begin of a worker's share.
  __device__ void seek(int worker) {
    worker_ = worker;
    at_ = begin(worker);
    end_ = begin(worker + 1);
    int64_t left = at_;
    for (int base = 0; base < p_.batch; base += kWarp) {
      if (base != scanned_) scan(base);
      const unsigned found = __ballot_sync(kFullMask, upto_ > left);
      if (found != 0) {
        const int lane = __ffs(found) - 1;
        if (lane > 0) left -= __shfl_sync(kFullMask, upto_, lane - 1);
        enter(base + lane);
        head_ = static_cast<int>(left / units_of_head_);
        left -= static_cast<int64_t>(head_) * units_of_head_;
        for (first_row_ = 0;; first_row_ += cut_.rows * cut_.lanes) {
          tiles_ = tiles_of(p_, cut_, request_, first_row_);
          const int units = units_between(cut_, tiles_);
          if (left < units) break;
          left -= units;
        }
        unit_ = static_cast<int>(left);
        return;
      }
      left -= __shfl_sync(kFullMask, upto_, kWarp - 1);
    }
  }

  // The next segment of the share.
  __device__ Segment next() {
    Segment s;
    s.head = -1;
    if (at_ >= end_) return s;
    const int units = units_between(cut_, tiles_), first = tiles_.first / cut_.unit;
    const int count = p_.fixed_split ? 1 : static_cast<int>(min(end_ - at_, static_cast<int64_t>(units - unit_)));
    s.request = request_;
    s.head = head_;
    s.first_row = first_row_;
    s.first_tile = max((first + unit_) * cut_.unit, tiles_.first);
    s.end_tile = min((first + unit_ + count) * cut_.unit, tiles_.end);
    s.part = count == units ? -1 : static_cast<int>(p_.fixed_split ? at_ : 2 * worker_ + (unit_ == 0));
    at_ += count;
    unit_ += count;
    if (unit_ == units && at_ < end_) next_group();
    return s;
  }

  // Where the partial results of a group are: those of a worker's first group lie at 2 worker, its last one's behind.
  struct Parts {
    int count, first;
    bool fixed;
    __device__ int operator[](int j) const { return fixed ? first + j : 2 * (first + j) + (j == 0); }
  };
  __device__ Parts parts_of(int64_t b, const Request& r, int head, int first_row) {
    const int units = units_between(cut_, tiles_of(p_, cut_, r, first_row));
    if (units == 0) return {};
    const int64_t begin = start_of(b) + int64_t{head} * units_of(r) + units_before(r, first_row);
    if (p_.fixed_split) return {units, static_cast<int>(begin), true};
    const int first = worker_of(begin);
    return {worker_of(begin + units - 1) - first + 1, first, false};
  }

 private:
  // Each lane takes request base + lane: upto_ becomes the units of it and of the lanes before it.
  __device__ void scan(int base) {
    const int lane = threadIdx.x % kWarp;
    upto_ = base + lane < p_.batch ? units_of(request_of(p_, base + lane)) * static_cast<int64_t>(p_.kv_heads) : 0;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int64_t before = __shfl_up_sync(kFullMask, upto_, step);
      if (lane >= step) upto_ += before;
    }
    scanned_ = base;
  }

  // The first unit of a request.
  __device__ int64_t start_of(int64_t request) {
    int64_t start = 0;
    for (int base = 0; base <= request; base += kWarp) {
      if (base != scanned_) scan(base);
      const int lane = static_cast<int>(min(request - base, int64_t{kWarp}));
      if (lane > 0) start += __shfl_sync(kFullMask, upto_, lane - 1);
    }
    return start;
  }

  // Of one head of a request: those of the rows before `rows`, of all.
  __device__ int units_before(const Request& r, int rows) const {
    int units = 0;
    for (int row = 0; row < rows; row += cut_.rows * cut_.lanes) units += units_between(cut_, tiles_of(p_, cut_, r, row));
    return units;
  }
  __device__ int units_of(const Request& r) const {
    return units_before(r, static_cast<int>(r.valid_rows) * group_size(p_));
  }

  __device__ void enter(int64_t b) {
    b_ = b;
    request_ = request_of(p_, b);
    units_of_head_ = units_of(request_);
  }

  // To the next group with something to do; there is one.
  __device__ void next_group() {
    unit_ = 0;
    do {
      first_row_ += cut_.rows * cut_.lanes;
      if (first_row_ >= request_.valid_rows * group_size(p_)) {
        first_row_ = 0;
        if (++head_ == p_.kv_heads) {
          head_ = 0;
          do enter(b_ + 1);
          while (units_of_head_ == 0);
        }
      }
      tiles_ = tiles_of(p_, cut_, request_, first_row_);
    } while (units_between(cut_, tiles_) == 0);
  }

  const TreeAttentionParams& p_;
  const Cut& cut_;
  int64_t total_ = 0, upto_ = 0;
  int scanned_ = -1, workers_ = 0;

  // Where the walk is.
  int worker_ = 0;
  int64_t at_ = 0, end_ = 0;  // units of the line
  int64_t b_ = 0;
  Request request_;
  int units_of_head_ = 0, head_ = 0, first_row_ = 0;
  Tiles tiles_{};
  int unit_ = 0;  // of the group
};

}  // namespace specdec
