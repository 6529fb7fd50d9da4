// The part that the kernels of expand_trellis share: the costs of all steps of a trellis, in shared memory.
//
// The cost of a step is minus its log-probability: 0 or more, +inf for no step. So the bits of costs order as integers.
//
// 1. Transitions. Rows of the tables are gathered from memory straight into fragments of tensor-core products: a lane
//    reads 16 bytes of a row, and both operands permute the rank alike. A warp multiplies 16 predecessors of a position
//    by 8 successors, and has all rows of rank 256 in flight at once. At depth 7 with 16 candidates, 14 warps do so.
//    Other ranks and float32 take a dot product per warp.
// 2. Normalisers: one row of K for each position and predecessor, four candidates per lane. Sums are over integers.
#pragma once

#include "core/mma.cuh"
#include "core/warp.cuh"
#include "draft/expand_trellis.h"
#include "draft/select_topk.h"

namespace specdec::draft {

constexpr int kTile = 16, kColumns = 8, kChunk = 8, kStep = 32;  // of tensor-core products
constexpr int kPerLane = 4;                                      // candidates of a lane that normalises

// The costs of a block's positions: one row per position and predecessor, or one per position without transitions.
// Position d of a cluster of blocks belongs to block d % size; a row is padded to a multiple of 4.
struct TrellisRows {
  int k, pitch, lanes;  // lanes that share a row: a power of two
  int depth;            // positions, at most as many as nodes
  int first, stride;    // of this block's positions
  bool moves;           // there are transitions

  __device__ TrellisRows(const ExpandTrellisParams& p, int first, int stride)
      : k(static_cast<int>(p.k)),
        pitch((k + kPerLane - 1) / kPerLane * kPerLane),
        lanes(1),
        depth(static_cast<int>(min(p.depth, p.nodes))),
        first(first),
        stride(stride),
        moves(p.predecessors != nullptr) {
    while (lanes * kPerLane < k) lanes *= 2;
  }
  __device__ int rows_per_position() const { return moves ? k : 1; }
};

// Return 8 elements of a row as fragments; zeros for no row. Volatile, as products are: the compiler would delay loads
// until their product, to save registers.
template <class T>
__device__ __forceinline__ uint4 load_chunk(const T* row, int at, bool there) {
  uint4 x{0, 0, 0, 0};
  asm volatile("{\n  .reg .pred p;\n  setp.ne.b32 p, %5, 0;\n  @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
               : "l"(row + at), "r"(static_cast<int>(there)));
  return x;
}

template <class T>
__device__ __forceinline__ uint32_t gated_pair(uint32_t x, uint32_t gate) {
  uint32_t out = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const T a{static_cast<uint16_t>(x >> 16 * half)}, g{static_cast<uint16_t>(gate >> 16 * half)};
    out |= static_cast<uint32_t>(from_float<T>(mul(to_float(a), to_float(g))).bits) << 16 * half;
  }
  return out;
}
template <class T>
__device__ __forceinline__ uint4 gated_chunk(uint4 x, uint4 gate) {
  return {gated_pair<T>(x.x, gate.x), gated_pair<T>(x.y, gate.y), gated_pair<T>(x.z, gate.z),
          gated_pair<T>(x.w, gate.w)};
}

// Compute a tile of the transitions of position d with one warp: 16 predecessors from row `top`, 8 successors from
// `left`. The rank is a multiple of 32, and rows are aligned to 16 bytes. kAhead steps are in flight at once.
template <class T, bool kGated, int kAhead>
__device__ void transition_tile(const ExpandTrellisParams& p, int64_t b, int d, int top, int left, int pitch,
                                float* out) {
  const int lane = lane_id(), row = lane / 4, chunk = lane % 4 * kChunk, k = static_cast<int>(p.k);
  const int rows = d == 0 ? 1 : k, rank = static_cast<int>(p.rank);
  const int64_t of_position = (b * p.depth + d) * k;
  int32_t upper = 0, lower = 0, right = p.topk_ids[of_position + min(left + row, k - 1)];  // ids, read at once
  if (!p.has_predecessor_rows) {
    const int32_t* const ids = d == 0 ? p.root_tokens + b : p.topk_ids + of_position - k;
    upper = ids[min(top + row, rows - 1)];
    lower = ids[min(top + row + 8, rows - 1)];
    if (d > 0 && p.id_map) {
      upper = target_id(p, upper);
      lower = target_id(p, lower);
    }
  }
  const auto predecessor = [&](int r, int32_t id) {
    if (r >= rows) return static_cast<const T*>(nullptr);
    return p.has_predecessor_rows ? predecessor_row<T>(p, b, d, r)
                                  : factor_row<T>(p.predecessors, id, p.predecessor_rows, rank);
  };
  const T *const above = predecessor(top + row, upper), *const below = predecessor(top + row + 8, lower);
  const T* const column =
      left + row < k ? factor_row<T>(p.successors, right, p.successor_rows, rank) : static_cast<const T*>(nullptr);
  const T* gate = kGated ? gate_row<T>(p, b, d) : nullptr;
  float sums[2][4] = {};  // of even and of odd steps: two chains of products
  uint4 a0[kAhead], a1[kAhead], c[kAhead], g[kGated ? kAhead : 1];
  const auto load = [&](int start) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int r = start + i * kStep + chunk;
      const bool there = start + i * kStep < rank;
      a0[i] = load_chunk(above, r, there && above);
      a1[i] = load_chunk(below, r, there && below);
      c[i] = load_chunk(column, r, there && column);
      if (kGated) g[i] = load_chunk(gate, r, there);
    }
  };
  load(0);
#pragma unroll 1
  for (int start = 0; start < rank; start += kAhead * kStep) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (kGated) {
        a0[i] = gated_chunk<T>(a0[i], g[i]);
        a1[i] = gated_chunk<T>(a1[i], g[i]);
      }
      mma<T>(sums[i % 2], {a0[i].x, a1[i].x, a0[i].y, a1[i].y}, c[i].x, c[i].y);
      mma<T>(sums[i % 2], {a0[i].z, a1[i].z, a0[i].w, a1[i].w}, c[i].z, c[i].w);
    }
    // At the end, so that the compiler does not move a product before a load.
    if (start + kAhead * kStep < rank) load(start + kAhead * kStep);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = top + row + (i < 2 ? 0 : 8), c = left + lane % 4 * 2 + i % 2;
    if (r < rows && c < k) out[r * pitch + c] = sums[0][i] + sums[1][i];
  }
}

// Compute one transition with a warp.
template <class T>
__device__ void transition_dot(const ExpandTrellisParams& p, int64_t b, int d, int r, int c, float* out) {
  const T* predecessor = predecessor_row<T>(p, b, d, r);
  const T* successor = successor_row<T>(p, b, d, c);
  const T* gate = gate_row<T>(p, b, d);
  float sum = 0;
  if (successor) {  // a factor that is not finite counts after a missing predecessor, too
    for (int64_t i = lane_id(); i < p.rank; i += kWarp) {
      float x = predecessor ? to_float(predecessor[i]) : 0.0f;
      if (gate) x = to_float(from_float<T>(mul(x, to_float(gate[i]))));
      sum = fused(x, to_float(successor[i]), sum);
    }
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) *out = sum;
}

// Compute the transitions of positions first, first + stride, ... below `last` into rows [positions, k, pitch], with
// all warps.
template <class T>
__device__ void transitions(const ExpandTrellisParams& p, int64_t b, const TrellisRows& rows, int last, bool by_tiles,
                            float* out) {
  const int k = rows.k, warps = static_cast<int>(blockDim.x) / kWarp, first = rows.first, stride = rows.stride;
  const int positions = (last - first + stride - 1) / stride, size = k * rows.pitch;
  if constexpr (sizeof(T) == 2) {
    if (by_tiles) {
      const int across = (k + kColumns - 1) / kColumns, tiles = (k + kTile - 1) / kTile * across;
#pragma unroll 1
      for (int task = warp_id(); task < positions * tiles; task += warps) {
        const int i = task / tiles, d = first + i * stride;
        const int top = task % tiles / across * kTile, left = task % across * kColumns;
        if (d == 0 && top > 0) continue;
        if (p.gates)
          transition_tile<T, true, 4>(p, b, d, top, left, rows.pitch, out + i * size);
        else
          transition_tile<T, false, 8>(p, b, d, top, left, rows.pitch, out + i * size);
      }
      return;
    }
  }
#pragma unroll 1
  for (int task = warp_id(); task < positions * k * k; task += warps) {
    const int i = task / (k * k), d = first + i * stride, r = task % (k * k) / k, c = task % k;
    if (d > 0 || r == 0) transition_dot<T>(p, b, d, r, c, out + i * size + r * rows.pitch + c);
  }
}

__device__ __forceinline__ uint64_t sum_of_lanes(uint64_t x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullMask, x, step);
  return x;
}

// Read the unary log-probabilities [depth, pitch] and the rest of each position, with the last threads of the block:
// the first ones gather rows meanwhile.
__device__ __forceinline__ void read_unary(const ExpandTrellisParams& p, int64_t b, const TrellisRows& rows,
                                           float* unary, float* rests) {
  const int at = static_cast<int>(blockDim.x - 1 - threadIdx.x), d = at / rows.lanes;
  if (at / kWarp * kWarp / rows.lanes >= rows.depth) return;  // none of this warp
  const int c = at % rows.lanes * kPerLane;
  const float* const from = p.topk_logprobs + (b * p.depth + d) * rows.k;
  float x[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) x[i] = d < rows.depth && c + i < rows.k ? from[c + i] : -INFINITY;
  uint64_t weights = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    x[i] = valid_logprob(x[i]);
    weights += weight_of(x[i]);
  }
  if (d < rows.depth && c < rows.pitch)
    *reinterpret_cast<float4*>(unary + d * rows.pitch + c) = {x[0], x[1], x[2], x[3]};
  const float rest = rest_logprob(sum_of_lanes(weights, rows.lanes));
  if (d < rows.depth && at % rows.lanes == 0) rests[d] = rest;
}

// Return the costs of the steps to a lane's four candidates, by their unary log-probabilities and transitions.
__device__ __forceinline__ float4 step_costs(const ExpandTrellisParams& p, const TrellisRows& rows, int d, float rest,
                                             const float4& unary, const float4& scores) {
  float x[kPerLane] = {unary.x, unary.y, unary.z, unary.w};
  if (rows.moves) {
    const float transition[kPerLane] = {scores.x, scores.y, scores.z, scores.w};
    float max = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      x[i] = transition_logit(x[i], transition[i]);
      max = fmaxf(max, x[i]);
    }
    for (int step = rows.lanes / 2; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(kFullMask, max, step));
    max = fmaxf(max, rest);
    uint64_t weights = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) weights += transition_weight(x[i], max);
    const float log_weights = log_of_weights(sum_of_lanes(weights, rows.lanes) + transition_weight(rest, max));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = transition_logprob(x[i], max, log_weights);
  }
  const Platt platt = platt_of(p.calibration, p.depths, d + 1);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    x[i] = calibrated(platt, x[i]);
    x[i] = x[i] > -INFINITY ? sub(0.0f, x[i]) : INFINITY;
  }
  return {x[0], x[1], x[2], x[3]};
}

// Replace the transitions of positions first, first + stride, ... below `last` by costs; without transitions, write
// costs [positions, pitch]. visit(row, d, c, costs) is called with the costs of candidates c to c + 3 of a
// row, by all lanes of a warp at once; d is -1 where a lane has none.
template <class Visit>
__device__ void normalise(const ExpandTrellisParams& p, const TrellisRows& rows, int last, const float* unary,
                          const float* rests, float* costs, Visit visit) {
  const int per_position = rows.rows_per_position(), positions = (last - rows.first + rows.stride - 1) / rows.stride;
  const int total = positions * per_position, step = static_cast<int>(blockDim.x) / rows.lanes;
  const int c = static_cast<int>(threadIdx.x) % rows.lanes * kPerLane;
#pragma unroll 1
  for (int start = 0; start < total; start += step) {  // as many turns for all lanes of a warp
    const int row = start + static_cast<int>(threadIdx.x) / rows.lanes;
    const int of_position = row % per_position, d = rows.first + row / per_position * rows.stride;
    const bool there = row < total && (d > 0 || of_position == 0) && c < rows.pitch;
    float4* const place = reinterpret_cast<float4*>(costs + row * rows.pitch + c);
    float4 of_unary{-INFINITY, -INFINITY, -INFINITY, -INFINITY}, scores{0, 0, 0, 0};
    if (there) {
      of_unary = *reinterpret_cast<const float4*>(unary + d * rows.pitch + c);
      if (rows.moves) scores = *place;
    }
    const float4 cost = step_costs(p, rows, there ? d : 0, there ? rests[d] : 0.0f, of_unary, scores);
    if (there) *place = cost;
    visit(row, there ? d : -1, c, cost);
  }
}

}  // namespace specdec::draft
