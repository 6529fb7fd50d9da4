// expand_trellis on a GPU, level by level: one block per request, and no bound on what its positions take.
//
// All sums of a beam's scores and the steps to the next position, the best of them by BlockTopk; then the best of all
// beams. Costs of positions stay in shared memory where they fit; else positions are computed in groups.
#include "core/block_topk.cuh"
#include "draft/expand_trellis_levels.h"
#include "draft/trellis_costs.cuh"

namespace specdec::draft {
namespace {

constexpr int kMaxDepth = static_cast<int>(kMaxTrellisDepth);
constexpr int kCostBytes = 96 * 1024;  // most shared memory for costs

// The shared memory of a block. Nodes of position d are at d * nodes.
struct Shared {
  float* costs;     // [group, k or 1, pitch]
  float* unary;     // [depth, pitch]
  float* rests;     // [depth]
  float* beam;      // [depth, nodes]
  int32_t* links;   // [depth, nodes]: parent's rank * k + candidate
  int32_t* places;  // [depth, nodes]: of a node in the result

  __device__ Shared(unsigned char* memory, const ExpandTrellisParams& p, const TrellisRows& rows, int group) {
    const int nodes = static_cast<int>(p.depth * p.nodes), depth = static_cast<int>(p.depth);
    costs = reinterpret_cast<float*>(memory);
    unary = costs + group * rows.rows_per_position() * rows.pitch;
    rests = unary + depth * rows.pitch;
    beam = rests + depth;
    links = reinterpret_cast<int32_t*>(beam + nodes);
    places = links + nodes;
  }
  static size_t bytes(const ExpandTrellisParams& p, int group) {
    const int64_t pitch = (p.k + kPerLane - 1) / kPerLane * kPerLane;
    return sizeof(float) * (group * (p.predecessors ? p.k : 1) * pitch + p.depth * (pitch + 1) + 3 * p.depth * p.nodes);
  }
};

template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads)
    expand_trellis_levels_kernel(ExpandTrellisParams p, int group, bool by_tiles) {
  begin_kernel();
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ typename BlockTopk<kThreads>::Storage storage;
  __shared__ int counts[kMaxDepth];
  TrellisRows rows(p, 0, 1);
  const Shared s(memory, p, rows, group);
  const int64_t b = blockIdx.x;
  const int k = rows.k, depth = rows.depth, position_size = rows.rows_per_position() * rows.pitch;
  const int nodes = static_cast<int>(p.nodes), thread = static_cast<int>(threadIdx.x);
  read_unary(p, b, rows, s.unary, s.rests);
  if (thread < kMaxDepth) counts[thread] = 0;

  BlockTopk<kThreads> topk(storage);
  int before = 1;
#pragma unroll 1
  for (int d = 0; d < depth && before > 0; ++d) {
    if (d % group == 0) {
      __syncthreads();
      rows.first = d;
      const int last = min(d + group, depth);
      if (rows.moves) transitions<T>(p, b, rows, last, by_tiles, s.costs);
      __syncthreads();
      normalise(p, rows, last, s.unary, s.rests, s.costs, [](auto&&...) {});
      __syncthreads();
    }
    const int room = static_cast<int>(min(static_cast<int64_t>(nodes - d), p.width));
    const float* of_depth = s.costs + d % group * position_size;
    const int stride = rows.moves ? rows.pitch : 0, children = before * k;
    const float* above = s.beam + (d - 1) * nodes;
    const int32_t* links = s.links + (d - 1) * nodes;
    const auto key_of = [&](int i) -> uint32_t {  // 0: no node
      const int parent = i / k, c = i - parent * k;
      const float from = d == 0 ? 0.0f : above[parent];
      const float score = child_score(from, -of_depth[(d == 0 ? 0 : links[parent] % k) * stride + c]);
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
  const int64_t pitch = (p.k + kPerLane - 1) / kPerLane * kPerLane;
  const int64_t of_position = static_cast<int64_t>(sizeof(float)) * (p.predecessors ? p.k : 1) * pitch;
  const int group = static_cast<int>(clamp_to(kCostBytes / of_position, int64_t{1}, p.depth));
  const auto is_aligned = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  const bool by_tiles =
      p.rank % kStep == 0 && is_aligned(p.predecessors) && is_aligned(p.successors) && is_aligned(p.gates);
  const size_t bytes = Shared::bytes(p, group);
  const auto kernel = expand_trellis_levels_kernel<T, kThreads>;
  if (bytes > 30 * 1024)  // with what is static, more than 48 KiB
    SD_CUDA_CHECK("expand_trellis",
                  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  launch("expand_trellis", kernel,
         {.grid = grid_x("expand_trellis", p.batch), .threads = kThreads, .shared_bytes = bytes}, stream, p, group,
         by_tiles);
}

}  // namespace

void expand_trellis_levels(const ExpandTrellisParams& p, Stream stream) {
  with_float_type(p.factor_dtype, [&]<class T>() {
    if (p.nodes <= 128)
      start<T, 512>(p, stream);
    else
      start<T, 1024>(p, stream);
  });
}

}  // namespace specdec::draft
