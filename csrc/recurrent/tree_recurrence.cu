// Run a linear recurrence over chains of any dtype, decay and alignment. Trees run in tree_pass.cu, chains of aligned
// bfloat16 rows in chain_recurrence.cu.
//
// One block per request, value head and slice of 32 values. The slice's state, 32 x key_dim, is in registers: a group
// of 16 lanes has 4 rows of it, each lane 4 channels out of every 64. The state is read and written once; the pending
// path is folded into it in registers. A chain goes in chunks of kChunkRows rows; each chunk is folded like a pending
// path before the next one. Keys and queries of a chunk are in shared memory. A row's products with the state are
// partial sums in all lanes, which a butterfly distributes so that each lane completes one of them. Pairs of a row and
// an earlier one, which a list in shared memory names, take a thread each. One warp solves the triangular system in
// registers, a lane per value.
//
// Bytes per value head: 8 * key_dim * value_dim of state, and rows, which are a few percent of that each.
#include "core/warp.cuh"
#include "recurrent/block_path.cuh"
#include "recurrent/chain_recurrence.h"
#include "recurrent/float4.cuh"
#include "recurrent/tree_pass.h"
#include "recurrent/tree_recurrence.h"

namespace specdec::recurrent {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr int kValues = 32;    // of a block: one per lane of a warp
constexpr int kGroup = 16;     // lanes that share rows of the state
constexpr int kStateRows = 4;  // of a lane
constexpr int kWarpRows = 4;   // of a chunk, whose sums a warp computes together
static_assert(kWarps * kWarpRows == kChunkRows);
static_assert(kThreads / kGroup * kStateRows == kValues && kValues == kWarp);

// Load elements d to d + 3 of a row of `width` elements; those beyond it are 0.
template <class T>
__device__ __forceinline__ float4 load4(const T* row, int d, int width, bool aligned) {
  float x[4] = {};
  if (aligned) {
    if (d < width) {
      if constexpr (sizeof(T) == 4) return *reinterpret_cast<const float4*>(row + d);
      T four[4];
      *reinterpret_cast<uint2*>(four) = *reinterpret_cast<const uint2*>(row + d);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = to_float(four[e]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (d + e < width) x[e] = to_float(row[d + e]);
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}

// The slice of values that a block works on, and its thread's part of the state.
struct Slice {
  int64_t h;
  int first_value, num_values;  // of the head's value_dim
  int row, channel;             // the first of the thread's rows, and of its channels
};

template <int kChunks>
struct StateTile {
  float4 x[kStateRows][kChunks];  // row r, channels 64 c + 4 (lane of the group) and the next 3

  __device__ void clear() {
#pragma unroll
    for (auto& row : x)
      for (float4& four : row) four = make_float4(0, 0, 0, 0);
  }

  __device__ void load(const RecurrentLayer& layer, const Slice& slice, int64_t slot, bool aligned) {
    const float* state = layer.state + layer.state_start(slot, slice.h) + slice.first_value * layer.key_dim;
#pragma unroll
    for (int r = 0; r < kStateRows; ++r)
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        x[r][c] = slice.row + r < slice.num_values
                      ? load4(state + (slice.row + r) * layer.key_dim, slice.channel + 64 * c,
                              static_cast<int>(layer.key_dim), aligned)
                      : make_float4(0, 0, 0, 0);
  }

  __device__ void store(const RecurrentLayer& layer, const Slice& slice, int64_t slot, bool aligned) const {
    float* state = layer.state + layer.state_start(slot, slice.h) + slice.first_value * layer.key_dim;
#pragma unroll
    for (int r = 0; r < kStateRows; ++r) {
      if (slice.row + r >= slice.num_values) break;
      float* row = state + (slice.row + r) * layer.key_dim;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int d = slice.channel + 64 * c, width = static_cast<int>(layer.key_dim);
        if (aligned) {
          if (d < width) *reinterpret_cast<float4*>(row + d) = x[r][c];
          continue;
        }
        const float four[4] = {x[r][c].x, x[r][c].y, x[r][c].z, x[r][c].w};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (d + e < width) row[d + e] = four[e];
      }
    }
  }

  // Fold a path of `count` nodes: node.k(j, c) and node.g4(j, c) are the thread's channels of chunk c, node.u(j, r) its
  // row r, node.g(j) the decay where channels share one.
  template <bool kByChannel, class Nodes>
  __device__ void fold(int count, const Nodes& nodes) {
    if (count == 0) return;
    float4 last[kChunks];
    const float last_of_all = kByChannel ? 0 : nodes.g(count - 1);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (kByChannel) last[c] = nodes.g4(count - 1, c);
#pragma unroll
      for (int r = 0; r < kStateRows; ++r)
        x[r][c] = kByChannel ? times(x[r][c], exp4(last[c])) : scaled(x[r][c], expf(last_of_all));
    }
#pragma unroll 2
    for (int j = 0; j < count; ++j) {
      const float weight = kByChannel ? 1 : decay(last_of_all, nodes.g(j));
      float u[kStateRows];
#pragma unroll
      for (int r = 0; r < kStateRows; ++r) u[r] = nodes.u(j, r) * weight;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float4 k = nodes.k(j, c);
        if (kByChannel) k = times(k, decay4(last[c], nodes.g4(j, c)));
#pragma unroll
        for (int r = 0; r < kStateRows; ++r) add_scaled(x[r][c], k, u[r]);
      }
    }
  }
};

// The nodes of a pending path, in the records.
struct PendingNodes {
  const RecurrentLayer& layer;
  const Slice& slice;
  int64_t first;
  const int32_t* nodes;
  bool aligned;

  __device__ int64_t record(int j) const { return first + nodes[j]; }
  __device__ float4 k(int j, int c) const {
    return load4(layer.k_records + layer.k_start(record(j), slice.h), slice.channel + 64 * c,
                 static_cast<int>(layer.key_dim), aligned);
  }
  __device__ float u(int j, int r) const {
    if (slice.row + r >= slice.num_values) return 0;
    return layer.u_records[layer.u_start(record(j), slice.h) + slice.first_value + slice.row + r];
  }
  __device__ float g(int j) const { return layer.g_records[layer.g_start(record(j), slice.h)]; }
  __device__ float4 g4(int j, int c) const {
    return load4(layer.g_records + layer.g_start(record(j), slice.h), slice.channel + 64 * c,
                 static_cast<int>(layer.key_dim), aligned);
  }
};

// Rows of a chunk in shared memory. Rows of keys are 4 elements longer than a multiple of 64, so that threads with
// different rows read from different banks; channels beyond key_dim are 0. Rows after the last have no pairs, and
// their u is 0.
template <int kChunks, bool kByChannel>
struct SharedRows {
  static constexpr int kStride = 64 * kChunks + 4;

  float q[kChunkRows * kStride], k[kChunkRows * kStride];  // normalized
  // For j < i, e^{G_i - G_j} q_i . k_j at [i, j], beta_i e^{G_i - G_j} k_i . k_j at [j, i]; q_i . k_i at [i, i].
  float pairs[kChunkRows * kChunkRows];
  float u[kChunkRows * kValues], out[kChunkRows * kValues];
  float g[kByChannel ? kChunkRows * kStride : 2 * kChunkRows];  // sums along the chunk; not by channel, then each own
  float beta[kChunkRows];
  uint16_t list[kChunkRows * (kChunkRows - 1) / 2];  // of pairs, kChunkRows i + j

  __device__ float4 four(const float* rows, int i, int d) const {
    return *reinterpret_cast<const float4*>(rows + i * kStride + d);
  }
  __device__ void set_four(float* rows, int i, int d, float4 x) const {
    *reinterpret_cast<float4*>(rows + i * kStride + d) = x;
  }
  __device__ float4 four_pairs(int row, int column) const {
    return *reinterpret_cast<const float4*>(pairs + row * kChunkRows + column);
  }
};

// The rows of a chunk as a path.
template <int kChunks, bool kByChannel>
struct ChunkNodes {
  const SharedRows<kChunks, kByChannel>& rows;
  const Slice& slice;

  __device__ float4 k(int j, int c) const { return rows.four(rows.k, j, slice.channel + 64 * c); }
  __device__ float u(int j, int r) const { return rows.u[j * kValues + slice.row + r]; }
  __device__ float g(int j) const { return rows.g[j]; }
  __device__ float4 g4(int j, int c) const { return rows.four(rows.g, j, slice.channel + 64 * c); }
};

// Clear the pairs.
template <int kChunks, bool kByChannel>
__device__ void clear_pairs(SharedRows<kChunks, kByChannel>& rows) {
  float4* pairs = reinterpret_cast<float4*>(rows.pairs);
  for (int n = threadIdx.x; n < kChunkRows * kChunkRows / 4; n += kThreads) pairs[n] = make_float4(0, 0, 0, 0);
}

// Load `count` rows from row `first` of a request on, a warp per row, and clear u of the padding after them; q . k of
// each row goes to the diagonal of pairs.
template <class T, int kChunks, bool kByChannel>
__device__ void load_rows(const TreeRecurrenceParams& p, const Request& request, const Slice& slice,
                          SharedRows<kChunks, kByChannel>& rows, int first, int count) {
  constexpr int kParts = (kChunks + 1) / 2;    // of 128 channels
  constexpr int kAhead = kParts == 1 ? 4 : 2;  // rows of a warp that are loaded together
  const int width = static_cast<int>(p.layer.key_dim), lane = lane_id();
  const int64_t key_head = p.layer.key_head(slice.h);
  for (int i = count + warp_id(); i < kChunkRows; i += kWarps) rows.u[i * kValues + lane] = 0;
  for (int base = warp_id(); base < count; base += kWarps * kAhead) {
    float4 q[kAhead][kParts], k[kAhead][kParts];
    float v[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int i = base + a * kWarps;
      if (i >= count) break;
      const int64_t row = request.first + first + i;
      const T* from_q = static_cast<const T*>(p.q) + row * p.q_strides.row + key_head * p.q_strides.head;
      const T* from_k = static_cast<const T*>(p.k) + row * p.k_strides.row + key_head * p.k_strides.head;
#pragma unroll
      for (int c = 0; c < kParts; ++c) {
        q[a][c] = load4(from_q, 128 * c + 4 * lane, width, p.aligned_rows);
        k[a][c] = load4(from_k, 128 * c + 4 * lane, width, p.aligned_rows);
      }
      const T* from_v = static_cast<const T*>(p.v) + row * p.v_strides.row + slice.h * p.v_strides.head;
      v[a] = lane < slice.num_values ? to_float(from_v[slice.first_value + lane]) : 0;
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int i = base + a * kWarps;
      if (i >= count) break;
      const int64_t row = request.first + first + i;
      float q_factor = p.scale, k_factor = 1, q_squares = 0, k_squares = 0, both = 0;
#pragma unroll
      for (int c = 0; c < kParts; ++c) {
        q_squares += dot(q[a][c], q[a][c]);
        k_squares += dot(k[a][c], k[a][c]);
      }
      if (p.normalizes) {
        q_factor /= sqrtf(warp_sum(q_squares) + p.l2norm_eps);
        k_factor /= sqrtf(warp_sum(k_squares) + p.l2norm_eps);
      }
#pragma unroll
      for (int c = 0; c < kParts; ++c) {
        const int d = 128 * c + 4 * lane;
        q[a][c] = scaled(q[a][c], q_factor);
        k[a][c] = scaled(k[a][c], k_factor);
        both += dot(q[a][c], k[a][c]);
        if (d >= 64 * kChunks) continue;
        rows.set_four(rows.q, i, d, q[a][c]);
        rows.set_four(rows.k, i, d, k[a][c]);
        if (kByChannel) {
          const float* g = p.g + row * p.g_strides.row + slice.h * p.g_strides.head;
          rows.set_four(rows.g, i, d, load4(g, d, width, p.aligned_state));
        }
      }
      both = warp_sum(both);
      const float beta = p.beta != nullptr ? p.beta[row * p.beta_stride + slice.h] : 1;
      rows.u[i * kValues + lane] = p.delta_rule ? v[a] : beta * v[a];
      if (lane != 0) continue;
      rows.pairs[i * kChunkRows + i] = both;
      rows.beta[i] = beta;
      if (!kByChannel) rows.g[kChunkRows + i] = p.g[row * p.g_strides.row + slice.h * p.g_strides.head];
    }
  }
}

// Prefetch into the L2 the rows that load_rows will load.
template <class T>
__device__ void prefetch_rows(const TreeRecurrenceParams& p, const Request& request, const Slice& slice, int first,
                              int count) {
  constexpr int kLine = 128 / sizeof(T);
  const int i = static_cast<int>(threadIdx.x) / 8, part = static_cast<int>(threadIdx.x) % 8;
  static_assert(kThreads / 8 == kChunkRows);
  if (i >= count) return;
  const int64_t row = request.first + first + i, key_head = p.layer.key_head(slice.h);
  const T* q = static_cast<const T*>(p.q) + row * p.q_strides.row + key_head * p.q_strides.head;
  const T* k = static_cast<const T*>(p.k) + row * p.k_strides.row + key_head * p.k_strides.head;
  for (int64_t d = part * kLine; d < p.layer.key_dim; d += 8 * kLine) {
    prefetch(q + d);
    prefetch(k + d);
  }
  if (part == 0)
    prefetch(static_cast<const T*>(p.v) + row * p.v_strides.row + slice.h * p.v_strides.head + slice.first_value);
}

// Sum the decays along the chunk.
template <int kChunks, bool kByChannel>
__device__ void sum_decays(SharedRows<kChunks, kByChannel>& rows, int count) {
  if (kByChannel) {
    for (int d = threadIdx.x; d < 64 * kChunks; d += kThreads)
      for (int i = 1; i < count; ++i) rows.g[i * rows.kStride + d] += rows.g[(i - 1) * rows.kStride + d];
  } else if (static_cast<int>(threadIdx.x) < count) {
    float sum = 0;
    for (int i = 0; i <= static_cast<int>(threadIdx.x); ++i) sum += rows.g[kChunkRows + i];
    rows.g[threadIdx.x] = sum;
  }
}

// List the pairs of rows and earlier ones, in the order of rows. All chunks have the same list; the last one needs a
// part of it.
template <int kChunks, bool kByChannel>
__device__ void list_pairs(SharedRows<kChunks, kByChannel>& rows, int count) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= count) return;
  for (int j = 0; j < i; ++j) rows.list[i * (i - 1) / 2 + j] = static_cast<uint16_t>(kChunkRows * i + j);
}

template <int kChunks, bool kByChannel>
__device__ void multiply_pairs(SharedRows<kChunks, kByChannel>& rows, int num_listed) {
  for (int n = threadIdx.x; n < num_listed; n += kThreads) {
    const int i = rows.list[n] / kChunkRows, j = rows.list[n] % kChunkRows;
    float kk = 0, qk = 0;
#pragma unroll 4
    for (int d = 0; d < 64 * kChunks; d += 4) {
      float4 earlier = rows.four(rows.k, j, d);
      if (kByChannel) earlier = times(earlier, decay4(rows.four(rows.g, i, d), rows.four(rows.g, j, d)));
      kk += dot(rows.four(rows.k, i, d), earlier);
      qk += dot(rows.four(rows.q, i, d), earlier);
    }
    const float weight = kByChannel ? 1 : decay(rows.g[i], rows.g[j]);
    rows.pairs[i * kChunkRows + j] = weight * qk;
    rows.pairs[j * kChunkRows + i] = rows.beta[i] * weight * kk;
  }
}

// Sum 2^n values over the 16 lanes of a group: in each lane, one of them is complete. Bits of the lane, from the
// highest on, are those of the value's index, from the highest on.
template <int kCount>
__device__ __forceinline__ float sum_in_group(const float (&x)[kCount]) {
  float kept[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) kept[n] = x[n];
  int size = kCount;
#pragma unroll
  for (int step = kGroup / 2; step > 0; step /= 2) {
    const bool upper = threadIdx.x & step;
    size /= 2;
    if (size == 0) {
      kept[0] += __shfl_xor_sync(kFullMask, kept[0], step);
    } else {
#pragma unroll
      for (int n = 0; n < kCount / 2; ++n) {
        if (n >= size) break;
        const float sent = upper ? kept[n] : kept[n + size];
        kept[n] = (upper ? kept[n + size] : kept[n]) + __shfl_xor_sync(kFullMask, sent, step);
      }
    }
    if (size == 0) size = 1;
  }
  return kept[0];
}

// Compute e^G S0 q of every node, and beta (v - e^G S0 k) with kDelta.
template <int kChunks, bool kByChannel, bool kDelta>
__device__ void multiply_state(const StateTile<kChunks>& state, SharedRows<kChunks, kByChannel>& rows,
                               const Slice& slice, int count, bool delta_rule) {
  const int lane = threadIdx.x % kGroup;
#pragma unroll 2
  for (int i = 0; i < count; ++i) {
    float sums[kDelta ? 2 * kStateRows : kStateRows] = {};  // of k, then of q
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int d = slice.channel + 64 * c;
      float4 q = rows.four(rows.q, i, d), weights = make_float4(1, 1, 1, 1);
      if (kByChannel) {
        weights = exp4(rows.four(rows.g, i, d));
        q = times(q, weights);
      }
#pragma unroll
      for (int r = 0; r < kStateRows; ++r) sums[kDelta ? kStateRows + r : r] += dot(state.x[r][c], q);
      if constexpr (kDelta) {
        float4 k = rows.four(rows.k, i, d);
        if (kByChannel) k = times(k, weights);
#pragma unroll
        for (int r = 0; r < kStateRows; ++r) sums[r] += dot(state.x[r][c], k);
      }
    }
    const float sum = sum_in_group(sums) * (kByChannel ? 1 : expf(rows.g[i]));
    const bool is_query = !kDelta || lane >= kGroup / 2;
    const int at = i * kValues + slice.row + (kDelta ? lane / 2 % kStateRows : lane / 4);
    if (lane % (kDelta ? 2 : 4) != 0) continue;
    if (is_query)
      rows.out[at] = sum;
    else if (delta_rule)
      rows.u[at] = rows.beta[i] * (rows.u[at] - sum);
  }
}

// Subtract earlier rows' parts of u, in the order of rows; called by the whole block.
template <int kChunks, bool kByChannel>
__device__ void solve(SharedRows<kChunks, kByChannel>& rows) {
  const int lane = lane_id();
  if (warp_id() == 0) {
    float u[kChunkRows];
#pragma unroll
    for (int i = 0; i < kChunkRows; ++i) u[i] = rows.u[i * kValues + lane];
#pragma unroll
    for (int j = 0; j < kChunkRows - 1; ++j) {
#pragma unroll
      for (int i = j / 4 * 4; i < kChunkRows; i += 4) {
        const float4 factors = rows.four_pairs(j, i);
        if (i > j) u[i] -= factors.x * u[j];
        if (i + 1 > j) u[i + 1] -= factors.y * u[j];
        if (i + 2 > j) u[i + 2] -= factors.z * u[j];
        if (i + 3 > j) u[i + 3] -= factors.w * u[j];
      }
    }
#pragma unroll
    for (int i = 0; i < kChunkRows; ++i) rows.u[i * kValues + lane] = u[i];
  }
  __syncthreads();
}

// Write the outputs of the rows.
template <class T, int kChunks, bool kByChannel>
__device__ void write_rows(const TreeRecurrenceParams& p, const Request& request, const Slice& slice,
                           const SharedRows<kChunks, kByChannel>& rows, int first, int count) {
  const int lane = lane_id(), begin = kWarpRows * warp_id();
  if (begin >= count) return;
  float out[kWarpRows];
#pragma unroll
  for (int n = 0; n < kWarpRows; ++n) out[n] = rows.out[(begin + n) * kValues + lane];
#pragma unroll 2
  for (int j = 0; j <= begin; j += 4) {
    float u[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) u[m] = rows.u[(j + m) * kValues + lane];
#pragma unroll
    for (int n = 0; n < kWarpRows; ++n) {
      float4 factors = rows.four_pairs(begin + n, j);
      if (j == begin) {  // on the diagonal: what follows it is another triangle
        if (n < 1) factors.y = 0;
        if (n < 2) factors.z = 0;
        if (n < 3) factors.w = 0;
      }
      out[n] += factors.x * u[0] + factors.y * u[1] + factors.z * u[2] + factors.w * u[3];
    }
  }
#pragma unroll
  for (int n = 0; n < kWarpRows; ++n) {
    const int i = begin + n;
    if (i >= count) break;
    if (lane >= slice.num_values) continue;
    const int64_t row = request.first + first + i;
    T* to = static_cast<T*>(p.out) + row * p.out_strides.row + slice.h * p.out_strides.head;
    to[slice.first_value + lane] = from_float<T>(out[n]);
  }
}

// Return the slice of a block, and its request: blocks of a head are neighbors.
__device__ Slice slice_of_block(const RecurrentLayer& layer, unsigned slices, int64_t& b) {
  Slice slice;
  const unsigned head = blockIdx.x / slices;
  slice.h = head % layer.value_heads;
  b = head / layer.value_heads;
  slice.first_value = static_cast<int>(blockIdx.x % slices) * kValues;
  slice.num_values = min(static_cast<int>(layer.value_dim) - slice.first_value, kValues);
  slice.row = static_cast<int>(threadIdx.x) / kGroup * kStateRows;
  slice.channel = static_cast<int>(threadIdx.x) % kGroup * 4;
  return slice;
}

template <class T>
__device__ void zero_rows(const TreeRecurrenceParams& p, const Request& request, const Slice& slice) {
  if (lane_id() >= slice.num_values) return;
  for (int64_t i = warp_id(); i < request.rows; i += kWarps)
    static_cast<T*>(
        p.out)[(request.first + i) * p.out_strides.row + slice.h * p.out_strides.head + slice.first_value + lane_id()] =
        T{};
}

template <class T, int kChunks, bool kByChannel, bool kDelta>
__global__ void __launch_bounds__(kThreads, kChunks == 4 ? 2 : 3)
    chain_kernel(TreeRecurrenceParams p, unsigned slices) {
  begin_kernel();
  extern __shared__ float4 shared[];
  int64_t b;
  const Slice slice = slice_of_block(p.layer, slices, b);
  const Request request = load_request(p.pending, p.rows, b);
  const PendingPath& path = request.path;
  auto& rows = *reinterpret_cast<SharedRows<kChunks, kByChannel>*>(shared);
  StateTile<kChunks> state;
  if (path.slot >= 0 && path.bits == 0) {  // load while the path is checked
    if (request.is_fresh)
      state.clear();
    else
      state.load(p.layer, slice, path.slot, p.aligned_state);
    clear_pairs(rows);
    __syncthreads();  // before load_rows writes the diagonal
    load_rows<T>(p, request, slice, rows, 0, min(kChunkRows, request.rows));
  }
  // The vote is a barrier: the rows are loaded.
  const bool is_bad = is_bad_path(p.pending, path, static_cast<int>(threadIdx.x));
  const int32_t bits = path.bits | (is_bad ? kBadTree : 0);
  if (path.slot < 0 || bits) {
    if (bits && slice.h == 0 && slice.first_value == 0 && threadIdx.x == 0)
      set_status(p.pending.status, path.slot, bits);
    return zero_rows<T>(p, request, slice);
  }
  if (request.rows == 0) return;

  const PendingNodes nodes{p.layer, slice, first_record(p.pending, path.buffer, path.slot), path.nodes,
                           p.aligned_state};
  state.template fold<kByChannel>(path.count, nodes);
  for (int first = 0; first < request.rows; first += kChunkRows) {
    const int count = min(kChunkRows, request.rows - first);
    if (first > 0) {
      load_rows<T>(p, request, slice, rows, first, count);
      __syncthreads();  // the rows are loaded
    }
    prefetch_rows<T>(p, request, slice, first + count, min(kChunkRows, request.rows - first - count));
    sum_decays(rows, count);
    if (first == 0) list_pairs(rows, count);
    __syncthreads();  // sums and list are complete
    multiply_pairs(rows, count * (count - 1) / 2);
    multiply_state<kChunks, kByChannel, kDelta>(state, rows, slice, count, p.delta_rule);
    __syncthreads();  // all products are complete
    if (p.delta_rule) solve(rows);
    write_rows<T>(p, request, slice, rows, first, count);
    state.template fold<kByChannel>(count, ChunkNodes<kChunks, kByChannel>{rows, slice});
    __syncthreads();  // before the next rows overwrite these
  }
  state.store(p.layer, slice, path.slot, p.aligned_state);
}

template <int kChunks, bool kByChannel>
__global__ void __launch_bounds__(kThreads) commit_recurrence_kernel(CommitRecurrenceParams p, unsigned slices) {
  begin_kernel();
  int64_t b;
  const Slice slice = slice_of_block(p.layer, slices, b);
  const PendingPath path = load_pending(p.pending, b);
  const bool is_bad = is_bad_path(p.pending, path, static_cast<int>(threadIdx.x));
  const int32_t bits = path.bits | (is_bad ? kBadTree : 0);
  if (path.slot < 0) return;
  if (bits && slice.h == 0 && slice.first_value == 0 && threadIdx.x == 0) set_status(p.pending.status, path.slot, bits);
  if (bits || path.count == 0) return;
  StateTile<kChunks> state;
  state.load(p.layer, slice, path.slot, p.aligned_state);
  const PendingNodes nodes{p.layer, slice, first_record(p.pending, path.buffer, path.slot), path.nodes,
                           p.aligned_state};
  state.template fold<kByChannel>(path.count, nodes);
  state.store(p.layer, slice, path.slot, p.aligned_state);
}

// Call f.template operator()<kChunks>() with the number of chunks of 64 channels that hold a key.
template <class F>
void with_chunks(int64_t key_dim, F&& f) {
#ifndef SPECDEC_COMPILE_CHECK
  if (key_dim <= 64) return f.template operator()<1>();
  if (key_dim > 128) return f.template operator()<4>();
#endif
  f.template operator()<2>();
}

template <class T, int kChunks, bool kByChannel, bool kDelta>
void launch_recurrence(const TreeRecurrenceParams& p, unsigned slices, Stream stream) {
  const char* op = "tree_recurrence";
  const auto kernel = chain_kernel<T, kChunks, kByChannel, kDelta>;
  const size_t bytes = sizeof(SharedRows<kChunks, kByChannel>);
  if (bytes > 48 * 1024)
    SD_CUDA_CHECK(op,
                  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  const unsigned grid = grid_x(op, (p.pending.batch + 1) * p.layer.value_heads * slices);
  launch(op, kernel, {.grid = grid, .threads = kThreads, .shared_bytes = bytes}, stream, p, slices);
}

unsigned slices_of(const RecurrentLayer& layer) {
  return static_cast<unsigned>((layer.value_dim + kValues - 1) / kValues);
}

}  // namespace

void tree_recurrence_cuda(const TreeRecurrenceParams& p, Stream stream) {
  if (p.rows.mask != nullptr) return tree_pass(p, stream);
  if (chain_runs_on_tensor_cores(p)) return chain_recurrence(p, stream);
  const unsigned slices = slices_of(p.layer);
  with_float_type(p.dtype, [&]<class T>() {
    with_chunks(p.layer.key_dim, [&]<int kChunks>() {
      if (p.layer.by_channel) return launch_recurrence<T, kChunks, true, true>(p, slices, stream);
      if (p.delta_rule) return launch_recurrence<T, kChunks, false, true>(p, slices, stream);
      launch_recurrence<T, kChunks, false, false>(p, slices, stream);
    });
  });
}

void commit_recurrence_cuda(const CommitRecurrenceParams& p, Stream stream) {
  const char* op = "commit_recurrence";
  const unsigned slices = slices_of(p.layer);
  const unsigned grid = grid_x(op, p.pending.batch * p.layer.value_heads * slices);
  with_chunks(p.layer.key_dim, [&]<int kChunks>() {
    const auto kernel =
        p.layer.by_channel ? commit_recurrence_kernel<kChunks, true> : commit_recurrence_kernel<kChunks, false>;
    launch(op, kernel, {.grid = grid, .threads = kThreads}, stream, p, slices);
  });
}

}  // namespace specdec::recurrent
