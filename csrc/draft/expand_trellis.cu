// expand_trellis on a GPU: one block per request.
//
// 1. Transitions. Rows of the tables are gathered from memory straight into fragments of tensor-core products: a lane
//    reads 16 bytes of a row, and both operands permute the rank alike. A warp multiplies 16 predecessors of a position
//    by 8 successors. At depth 7, 16 candidates and rank 256, 224 rows of 512 bytes are read by 14 warps at once.
//    Other ranks and float32 take a dot product per warp.
// 2. Normalisers: one row of K for each position and predecessor, on as many lanes. Sums are over integers.
// 3. Levels: all sums of a beam's scores and transitions, the best of them by BlockTopk; then the best of all beams.
//
// Log-probabilities of all positions stay in shared memory where they fit; else positions are computed in groups.
#include <algorithm>

#include "core/block_topk.cuh"
#include "core/mma.cuh"
#include "core/warp.cuh"
#include "draft/expand_trellis.h"
#include "draft/select_topk.h"

namespace specdec::draft {
namespace {

constexpr int kMaxDepth = static_cast<int>(kMaxTrellisDepth);
constexpr int kScoreBytes = 96 * 1024;                           // most shared memory for log-probabilities
constexpr int kTile = 16, kColumns = 8, kChunk = 8, kStep = 32;  // of tensor-core products

// The shared memory of a block. Nodes of position d are at d * nodes.
struct Shared {
  float* scores;    // [group, k, k]: transitions, then log-probabilities; without transitions not there
  float* unary;     // [depth, k]
  float* beam;      // [depth, nodes]
  int32_t* links;   // [depth, nodes]: parent's rank * k + candidate
  int32_t* places;  // [depth, nodes]: of a node in the result

  __device__ Shared(unsigned char* memory, const ExpandTrellisParams& p, int group) {
    const int nodes = static_cast<int>(p.depth * p.nodes), k = static_cast<int>(p.k);
    beam = reinterpret_cast<float*>(memory);
    links = reinterpret_cast<int32_t*>(beam + nodes);
    places = links + nodes;
    unary = reinterpret_cast<float*>(places + nodes);
    scores = unary + p.depth * k;
  }
  static size_t bytes(const ExpandTrellisParams& p, int group) {
    return sizeof(float) * (3 * p.depth * p.nodes + p.depth * p.k + group * p.k * p.k);
  }
};

// Return 8 elements of a row as fragments; zeros for no row.
template <class T>
__device__ __forceinline__ uint4 load_chunk(const T* row, int at) {
  return row ? __ldg(reinterpret_cast<const uint4*>(row + at)) : uint4{0, 0, 0, 0};
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
// `left`. The rank is a multiple of 32, and rows are aligned to 16 bytes.
template <class T>
__device__ void transition_tile(const ExpandTrellisParams& p, int64_t b, int d, int top, int left, float* out) {
  const int lane = lane_id(), row = lane / 4, chunk = lane % 4 * kChunk, k = static_cast<int>(p.k);
  const int rows = d == 0 ? 1 : k, rank = static_cast<int>(p.rank);
  const T* above = top + row < rows ? predecessor_row<T>(p, b, d, top + row) : nullptr;
  const T* below = top + row + 8 < rows ? predecessor_row<T>(p, b, d, top + row + 8) : nullptr;
  const T* column = left + row < k ? successor_row<T>(p, b, d, left + row) : nullptr;
  const T* gate = gate_row<T>(p, b, d);
  float sums[4] = {};
#pragma unroll 4
  for (int r = chunk; r < rank; r += kStep) {
    uint4 a0 = load_chunk(above, r), a1 = load_chunk(below, r);
    const uint4 c = load_chunk(column, r);
    if (gate) {
      const uint4 g = load_chunk(gate, r);
      a0 = gated_chunk<T>(a0, g);
      a1 = gated_chunk<T>(a1, g);
    }
    mma<T>(sums, {a0.x, a1.x, a0.y, a1.y}, c.x, c.y);
    mma<T>(sums, {a0.z, a1.z, a0.w, a1.w}, c.z, c.w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = top + row + (i < 2 ? 0 : 8), c = left + lane % 4 * 2 + i % 2;
    if (r < rows && c < k) out[r * k + c] = sums[i];
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
  if (lane_id() == 0) out[r * p.k + c] = sum;
}

// Compute the transitions of positions [first, last) with all warps.
template <class T>
__device__ void transitions(const ExpandTrellisParams& p, int64_t b, int first, int last, bool by_tiles, float* out) {
  const int k = static_cast<int>(p.k), warps = blockDim.x / kWarp;
  if constexpr (sizeof(T) == 2) {
    if (by_tiles) {
      const int down = (k + kTile - 1) / kTile, across = (k + kColumns - 1) / kColumns, tiles = down * across;
#pragma unroll 1
      for (int task = warp_id(); task < (last - first) * tiles; task += warps) {
        const int d = first + task / tiles, top = task % tiles / across * kTile, left = task % across * kColumns;
        if (d > 0 || top == 0) transition_tile<T>(p, b, d, top, left, out + (d - first) * k * k);
      }
      return;
    }
  }
#pragma unroll 1
  for (int task = warp_id(); task < (last - first) * k * k; task += warps) {
    const int d = first + task / (k * k), r = task % (k * k) / k, c = task % k;
    if (d > 0 || r == 0) transition_dot<T>(p, b, d, r, c, out + (d - first) * k * k);
  }
}

__device__ __forceinline__ uint64_t sum_of_lanes(uint64_t x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullMask, x, step);
  return x;
}

// Replace the transitions of positions [first, last) by calibrated log-probabilities. A row has `lanes` lanes, a power
// of 2 up to a warp.
__device__ void normalise(const ExpandTrellisParams& p, int first, int last, const float* unary, int lanes,
                          float* scores) {
  const int k = static_cast<int>(p.k), thread = static_cast<int>(threadIdx.x), lane = thread % lanes;
  const int rows = (last - first) * k, step = static_cast<int>(blockDim.x) / lanes;
#pragma unroll 1
  for (int start = 0; start < rows; start += step) {  // as many turns for all lanes of a warp
    const int row = start + thread / lanes, d = first + row / k;
    const bool there = row < rows && (d > 0 || row % k == 0);
    float* out = scores + row * k;
    float logits[2] = {-INFINITY, -INFINITY};
    uint64_t before = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = lane + i * lanes;
      if (!there || c >= k) continue;
      const float x = unary[d * k + c];
      before += weight_of(x);
      logits[i] = transition_logit(x, out[c]);
    }
    const float rest = rest_logprob(sum_of_lanes(before, lanes));
    float max = fmaxf(logits[0], logits[1]);
    for (int width = lanes / 2; width > 0; width /= 2) max = fmaxf(max, __shfl_xor_sync(kFullMask, max, width));
    max = fmaxf(max, rest);
    uint64_t weights = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (there && lane + i * lanes < k) weights += transition_weight(logits[i], max);
    weights = sum_of_lanes(weights, lanes) + transition_weight(rest, max);
    const float log_weights = log_of_weights(weights);
    const Platt platt = platt_of(p.calibration, p.depths, d + 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = lane + i * lanes;
      if (there && c < k) out[c] = calibrated(platt, transition_logprob(logits[i], max, log_weights));
    }
  }
}

template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads) expand_trellis_kernel(ExpandTrellisParams p, int group, bool by_tiles) {
  begin_kernel();
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ typename BlockTopk<kThreads>::Storage storage;
  __shared__ int counts[kMaxDepth];
  const Shared s(memory, p, group);
  const int64_t b = blockIdx.x;
  const int k = static_cast<int>(p.k), depth = static_cast<int>(min(p.depth, p.nodes));
  const int nodes = static_cast<int>(p.nodes), thread = static_cast<int>(threadIdx.x);
  const bool moves = p.predecessors != nullptr;
  int lanes = 1;
  while (lanes < min(k, kWarp)) lanes *= 2;

  const float* logprobs = p.topk_logprobs + b * p.depth * k;
  for (int i = thread; i < depth * k; i += kThreads) {
    const float x = valid_logprob(logprobs[i]);
    s.unary[i] = moves ? x : calibrated(platt_of(p.calibration, p.depths, i / k + 1), x);
  }
  if (thread < kMaxDepth) counts[thread] = 0;

  BlockTopk<kThreads> topk(storage);
  int before = 1;
#pragma unroll 1
  for (int d = 0; d < depth && before > 0; ++d) {
    if (d % group == 0) {
      __syncthreads();
      if (moves) {
        const int last = min(d + group, depth);
        transitions<T>(p, b, d, last, by_tiles, s.scores);
        __syncthreads();
        normalise(p, d, last, s.unary, lanes, s.scores);
        __syncthreads();
      }
    }
    const int room = static_cast<int>(min(static_cast<int64_t>(nodes - d), p.width));
    const float* of_depth = moves ? s.scores + d % group * k * k : s.unary + d * k;
    const int stride = moves ? k : 0, children = before * k;
    const float* above = s.beam + (d - 1) * nodes;
    const int32_t* links = s.links + (d - 1) * nodes;
    const auto key_of = [&](int i) -> uint32_t {  // 0: no node
      const int parent = i / k, c = i - parent * k;
      const float from = d == 0 ? 0.0f : above[parent];
      const float score = child_score(from, of_depth[(d == 0 ? 0 : links[parent] % k) * stride + c]);
      return score > -INFINITY ? order_key(score) : 0;
    };
    uint32_t best = 0;
    for (int i = thread; i < children; i += kThreads) best = max(best, key_of(i));
    const uint32_t pivot = topk.find_pivot(best, children >= kThreads, room);
    topk.collect(pivot, room, children, [&](uint32_t least, auto f) {
      for (int i = thread; i < children; i += kThreads) {
        const uint32_t key = key_of(i);
        if (key >= least && key > 0) f(entry_key(key, i));
      }
    });
    topk.rank(room, [&](int j, uint64_t key) {
      s.beam[d * nodes + j] = key_float(key_score(key));
      s.links[d * nodes + j] = static_cast<int32_t>(key_id(key));
    });
    before = min(topk.count(), room);
    if (thread == 0) counts[d] = before;
    __syncthreads();
  }

  // The best of all beams: position d's node of rank j has id d * nodes + j.
  const auto key_of = [&](int i) -> uint32_t {
    return i - i / nodes * nodes < counts[i / nodes] ? order_key(s.beam[i]) : 0;
  };
  const int all = depth * nodes;
  uint32_t best = 0;
  for (int i = thread; i < all; i += kThreads) best = max(best, key_of(i));
  const uint32_t pivot = topk.find_pivot(best, false, nodes);
  topk.collect(pivot, nodes, all, [&](uint32_t least, auto f) {
    for (int i = thread; i < all; i += kThreads) {
      const uint32_t key = key_of(i);
      if (key >= least && key > 0) f(entry_key(key, i));
    }
  });
  topk.rank(nodes, [&](int place, uint64_t key) { s.places[key_id(key)] = place; });
  const int count = min(topk.count(), nodes);
  const int64_t out = b * nodes;
  for (int i = count + thread; i < nodes; i += kThreads) {
    p.out_tokens[out + i] = 0;
    p.out_parents[out + i] = -1;
    p.out_scores[out + i] = -INFINITY;
  }
  __syncthreads();
  topk.rank(nodes, [&](int place, uint64_t key) {
    const int i = static_cast<int>(key_id(key)), d = i / nodes, link = s.links[i];
    p.out_tokens[out + place] = target_id(p, p.topk_ids[(b * p.depth + d) * k + link % k]);
    p.out_parents[out + place] = d == 0 ? -1 : s.places[(d - 1) * nodes + link / k];
    p.out_scores[out + place] = key_float(key_score(key));
  });
}

template <class T, int kThreads>
void start(const ExpandTrellisParams& p, Stream stream) {
  const int64_t of_position = static_cast<int64_t>(sizeof(float)) * p.k * p.k;
  const int group =
      p.predecessors ? static_cast<int>(clamp_to(kScoreBytes / of_position, int64_t{1}, p.depth)) : kMaxDepth;
  const auto is_aligned = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  const bool by_tiles =
      p.rank % kStep == 0 && is_aligned(p.predecessors) && is_aligned(p.successors) && is_aligned(p.gates);
  const size_t bytes = Shared::bytes(p, p.predecessors ? group : 0);
  const auto kernel = expand_trellis_kernel<T, kThreads>;
  if (bytes > 30 * 1024)  // with what is static, more than 48 KiB
    SD_CUDA_CHECK("expand_trellis",
                  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  launch("expand_trellis", kernel,
         {.grid = grid_x("expand_trellis", p.batch), .threads = kThreads, .shared_bytes = bytes}, stream, p, group,
         by_tiles);
}

}  // namespace

void expand_trellis_cuda(const ExpandTrellisParams& p, Stream stream) {
  with_float_type(p.factor_dtype, [&]<class T>() {
    if (p.nodes <= 128)
      start<T, 512>(p, stream);
    else
      start<T, 1024>(p, stream);
  });
}

}  // namespace specdec::draft
