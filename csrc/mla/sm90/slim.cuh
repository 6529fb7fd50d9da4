// The slim form of the wgmma kernel, for the calls of rounds: the same segments, sums and bits with less code.
//
// A short call spends most of its time outside of its KV tiles, and less of it the fewer instructions it runs once.
// SlimParams and SlimPlan turn fields that such calls share into constants, so that code for other values is left out.
// SlimWalk finds the segments of stream_k.cuh by less work: in these calls every item of a request has all its KV.
#pragma once

#include "attention/common/stream_k.cuh"
#include "mla/mla_tree_attention.h"

namespace specdec::mla {

// Walk of a worker that takes its stream-K share, as attention::StreamK<false>.
class SlimWalk {
 public:
  static constexpr int kLaneRequests = 2;  // lane l holds requests l and l + 32
  static constexpr int kMostRequests = kLaneRequests * kWarp;

  // Return the next segment; see attention::next_segment_of.
  __device__ __forceinline__ attention::Segment next_segment(const MlaTreeAttentionParams& p,
                                                             const attention::DevicePlan& plan, int worker) {
    return attention::next_segment_of(*this, progress_, worker, p, plan);
  }

 private:
  static constexpr int kRows = 64, kTokens = 64;  // of a row tile and of a KV tile

  // What a segment needs of attention::Request, in few registers.
  struct Lengths {
    int slot, first_row, valid_rows, prefix, end;  // first_row: of packed rows

    bool operator==(const Lengths&) const = default;
    __device__ __forceinline__ int tiles() const { return (end + kTokens - 1) / kTokens; }
    __device__ __forceinline__ int items(const attention::DevicePlan& plan) const {
      const int rows_each = kRows * plan.row_tiles;
      return (valid_rows * plan.gqa_group.divisor + rows_each - 1) / rows_each;
    }
  };
  using LaneRequests = Lengths[kLaneRequests];

  __device__ __forceinline__ static void read(const MlaTreeAttentionParams& p, LaneRequests& requests) {
#pragma unroll
    for (int k = 0; k < kLaneRequests; ++k) {
      const int b = k * kWarp + static_cast<int>(threadIdx.x) % kWarp;
      requests[k] = {};
      if (b >= p.batch) continue;
      const attention::Request r = attention::load_request(p, b);
      requests[k] = {.slot = r.slot,
                     .first_row = p.cu_seqlens_q != nullptr ? static_cast<int>(r.flat_row) : 0,
                     .valid_rows = r.valid_rows,
                     .prefix = r.prefix,
                     .end = r.end};
    }
  }

 public:  // the steps of next_segment_of()
  __device__ __forceinline__ bool lengths_unchanged(const MlaTreeAttentionParams& p,
                                                    const attention::DevicePlan&) const {
    LaneRequests now;
    read(p, now);
    bool same = true;
#pragma unroll
    for (int k = 0; k < kLaneRequests; ++k) same &= now[k] == requests_[k];
    return __all_sync(kFullMask, same);
  }

  // Read the lengths and divide the units among the workers.
  __device__ __forceinline__ void count_units(const MlaTreeAttentionParams& p, const attention::DevicePlan& plan) {
    read(p, requests_);
    total_ = 0;
    int heads = 0, min_units = INT32_MAX, max_units = 0;
#pragma unroll
    for (int k = 0; k < kLaneRequests; ++k) {
      sums_[k] = INT32_MAX;
      if (k * kWarp >= p.batch) continue;
      const int units = requests_[k].tiles() * requests_[k].items(plan);
      heads += __popc(__ballot_sync(kFullMask, units > 0));
      if (units > 0) min_units = min(min_units, units);
      max_units = max(max_units, units);
      sums_[k] = total_ + sum_up_to_lane(units);
      total_ = __shfl_sync(kFullMask, sums_[k], kWarp - 1);
    }
    workers_ = min(plan.workers, total_);
    if (workers_ == 0) return;
    if (__reduce_min_sync(kFullMask, min_units) == __reduce_max_sync(kFullMask, max_units)) {
      const int max_share = total_ / workers_ + attention::kSplitCostTokens / kTokens;
      attention::end_shares_at_heads(workers_, total_, heads, max_share);
    }
    units_each_ = total_ / workers_;
    remainder_ = total_ - units_each_ * workers_;
    workers_per_unit_ = static_cast<float>(workers_) / static_cast<float>(total_);
  }

  __device__ __forceinline__ void seek(int worker) {
    worker_ = worker;
    at_ = worker < workers_ ? begin(worker) : 0;
    end_ = worker < workers_ ? begin(worker + 1) : 0;
  }

  // Return the next segment of the share, or one with kv_head -1.
  __device__ __forceinline__ attention::Segment next(const MlaTreeAttentionParams& p,
                                                     const attention::DevicePlan& plan) {
    attention::Segment s;
    s.kv_head = -1;
    if (at_ >= end_) return s;
    // The request is the first whose sum exceeds at_.
    int b = 0, sum = 0;
    Lengths r{};
    bool found = false;
#pragma unroll
    for (int k = 0; k < kLaneRequests; ++k) {
      const unsigned lanes = __ballot_sync(kFullMask, sums_[k] > at_);
      if (found || lanes == 0 || k * kWarp >= p.batch) continue;
      const int lane = __ffs(lanes) - 1;
      found = true;
      b = k * kWarp + lane;
      sum = __shfl_sync(kFullMask, sums_[k], lane);
      r = attention::broadcast(requests_[k], lane);
    }
    const int tiles = r.tiles(), left = at_ - (sum - tiles * r.items(plan));
    const int item = left / tiles, unit = left - item * tiles, count = min(end_ - at_, tiles - unit);
    const bool packed = p.cu_seqlens_q != nullptr;
    s.request = {};
    s.request.slot = r.slot;
    s.request.valid_rows = r.valid_rows;
    s.request.rows = packed ? r.valid_rows : static_cast<int>(p.q_rows);
    s.request.flat_row = packed ? r.first_row : b * p.q_rows;
    s.request.q_start = packed ? r.first_row * p.q_strides.row : b * p.q_strides.batch;
    s.request.out_start = packed ? r.first_row * p.out_strides.row : b * p.out_strides.batch;
    s.request.prefix = r.prefix;
    s.request.end = r.end;
    s.request.shift = p.tail_len < 0 ? 0 : static_cast<int>(p.tail_len) - s.request.rows;
    s.kv_head = 0;
    s.first_row = item * kRows * plan.row_tiles;
    s.first_tile = unit;
    s.end_tile = unit + count;
    s.splits = s.workers = 1;
    s.partial = s.first_partial = s.rank = 0;
    s.last = unit + count == tiles || at_ + count == end_;
    s.merge = false;
    if (count != tiles) {
      const int first = at_ - unit, first_worker = worker_of(first);
      s.splits = s.workers = worker_of(first + tiles - 1) - first_worker + 1;
      s.rank = worker_ - first_worker;
      s.partial = 2 * worker_ + (unit == 0);
      s.first_partial = 2 * first_worker + 1;
    }
    at_ += count;
    return s;
  }

 private:
  __device__ __forceinline__ int begin(int worker) const {
    return units_each_ * worker + remainder_ * worker / workers_;
  }
  __device__ __forceinline__ int worker_of(int unit) const {
    // Exact, or off by one.
    const int near = static_cast<int>(static_cast<float>(unit) * workers_per_unit_);
    return near + (begin(near + 1) <= unit) - (begin(near) > unit);
  }

  LaneRequests requests_;
  int sums_[kLaneRequests];                                       // units up to and with this request
  int total_ = 0, workers_ = 0, units_each_ = 0, remainder_ = 0;  // total_ = workers_ units_each_ + remainder_
  float workers_per_unit_ = 0;
  int worker_ = 0, at_ = 0, end_ = 0;  // position of the walk, in units
  attention::WalkProgress progress_;
};

// Return whether the slim form can run a call: without window and fixed_split, with a mask of one word or a causal
// chain of one item per request, of few requests, and with shares of KV. Rounds make such calls for the target and the
// draft.
inline bool can_be_slim(const MlaTreeAttentionParams& p) {
  const bool all_kv =
      p.mask != nullptr ? p.mask_words == 1 : p.q_rows * p.q_heads <= p.plan.tile_rows * p.plan.row_tiles;
  return all_kv && p.window == INT64_MAX && p.fixed_split == 0 && p.batch <= SlimWalk::kMostRequests &&
         !p.plan.whole_items;
}

struct SlimParams : MlaTreeAttentionParams {
  __device__ __forceinline__ explicit SlimParams(const MlaTreeAttentionParams& p) : MlaTreeAttentionParams(p) {
    window = INT64_MAX;
    fixed_split = 0;
    mask_words = 1;
    kv_heads = 1;
  }
};

struct SlimPlan : attention::DevicePlan {
  __device__ __forceinline__ explicit SlimPlan(const attention::DevicePlan& plan) : DevicePlan(plan) {
    whole_items = false;
    cluster_blocks = 0;
    blocks_per_sm = 1;
    tile_rows = 64;
    tile_tokens.divisor = 64;
    tile_tokens.multiplier = 1u << 31;
    tile_tokens.shift_right = 5;
    split_tiles.divisor = 1;
  }
};

}  // namespace specdec::mla
