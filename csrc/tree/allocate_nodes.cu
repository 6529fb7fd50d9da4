// allocate_nodes on a GPU: one block for the allocation and one per budget level, one thread per request.
//
// Each block bisects in 31 steps; a step reads log2(nodes) scores per request, which stay in L1, and sums over the
// block. Reads 4 bytes per node that a search visits, writes 8 bytes per request. Latency bound: some microseconds,
// whatever the budget.
#include "core/cuda.cuh"
#include "core/warp.cuh"
#include "tree/allocate_nodes.h"

namespace specdec::tree {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

// Return the sum over the block to every thread.
template <class T>
__device__ T block_sum(T x, T (&warp_sums)[kWarps]) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullMask, x, step);
  __syncthreads();  // the words of the previous sum have been read
  if (lane_id() == 0) warp_sums[warp_id()] = x;
  __syncthreads();
  T sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += warp_sums[w];
  return sum;
}

// Return the sum over the threads before this one; set `total` to the block's sum.
__device__ int32_t sum_before(int32_t x, int32_t (&warp_sums)[kWarps], int32_t& total) {
  const int32_t through = sum_up_to_lane(x);
  __syncthreads();
  if (lane_id() == kWarp - 1) warp_sums[warp_id()] = through;
  __syncthreads();
  int32_t before = through - x;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp_id()) before += warp_sums[w];
    total += warp_sums[w];
  }
  return before;
}

__global__ void __launch_bounds__(kThreads) allocate_nodes_kernel(AllocateNodesParams p) {
  begin_kernel();
  __shared__ int32_t warp_sums[kWarps];
  __shared__ unsigned long long weights[kWarps];
  const int64_t level = static_cast<int64_t>(blockIdx.x) - 1;
  const int32_t limit = node_limit(p, level);
  // A search starts with three dependent reads. In most batches each thread keeps the result for its own request.
  const int32_t own = threadIdx.x < p.batch ? list_length(p, threadIdx.x, limit) : 0;
  const auto length_of = [&](int64_t b) { return b < kThreads ? own : list_length(p, b, limit); };
  const auto sum_over_batch = [&](auto f) {
    int32_t sum = 0;
    for (int64_t b = threadIdx.x; b < p.batch; b += kThreads) sum += f(b, length_of(b));
    return static_cast<int64_t>(block_sum(sum, warp_sums));
  };
  const int64_t roots = sum_over_batch([](int64_t, int32_t length) { return static_cast<int32_t>(length > 0); });
  const int64_t room = non_root_rows(level < 0 ? p.budget : p.budget_levels[level], roots);
  const Cut cut = find_cut(room, [&](uint32_t key) {
    return sum_over_batch([&](int64_t b, int32_t length) { return count_at_least(p, b, length, key); });
  });

  if (level >= 0) {
    unsigned long long weight = 0;
    for (int64_t b = threadIdx.x; b < p.batch; b += kThreads) weight += weight_above(p, b, length_of(b), cut);
    weight = block_sum(weight, weights);
    if (threadIdx.x > 0) return;
    weight += static_cast<uint64_t>(cut.ties) * weight_of(key_float(cut.key));
    p.out_expected[level] = sum_of(weight);
    p.out_cuts[level] = cut_score(room, cut);
    return;
  }

  int32_t ties_before = 0, taken = 0;  // of earlier iterations
  for (int64_t first = 0; first < p.batch; first += kThreads) {
    const int64_t b = first + threadIdx.x;
    const bool there = b < p.batch;
    const int32_t length = there ? length_of(b) : 0;
    const SelectedCounts found = there ? count_selected(p, b, length, cut) : SelectedCounts{0, 0};
    int32_t total;
    const int64_t left = cut.ties - ties_before - sum_before(found.equal, warp_sums, total);
    ties_before += total;
    const auto ties = static_cast<int32_t>(clamp_to<int64_t>(left, 0, found.equal));
    const int32_t count = length > 0 ? 1 + found.above + ties : 0;
    const int32_t at = taken + sum_before(count, warp_sums, total);
    taken += total;
    if (!there) continue;
    p.out_num_nodes[b] = count;
    p.out_cu_seqlens[b] = at;
  }
  if (threadIdx.x == 0) p.out_cu_seqlens[p.batch] = taken;
}

}  // namespace

void allocate_nodes_cuda(const AllocateNodesParams& p, Stream stream) {
  launch("allocate_nodes", allocate_nodes_kernel,
         {.grid = grid_x("allocate_nodes", 1 + p.num_levels), .threads = kThreads}, stream, p);
}

}  // namespace specdec::tree
