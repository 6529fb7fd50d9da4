// Rows choose, a warp each, whose lanes hold the scores as ordered integers: the best of all lanes is found and taken
// away as often as the row takes an expert. Then one block sorts the pairs by counting: warps have parts of the pairs
// that follow one another, each counts its own by experts, and knows from all counts where to put them. Few rows are
// one launch, in which the block that chooses also sorts; of many rows or experts other blocks choose first.
//
// Reads the scores once; of few rows it is latency that counts, some thirty instructions for each expert taken.
#include <algorithm>

#include "core/warp.cuh"
#include "layers/moe/moe_grouped_gemm.h"
#include "layers/moe/moe_route.h"

namespace specdec::layers {
namespace {

constexpr int kSortThreads = 1024, kChoiceThreads = 256;
constexpr int kFewRows = 64, kFewExperts = 256, kFewThreads = 512;
constexpr int kMaxCounts = 8192;  // of warps and experts
static_assert(kMaxCounts >= kMaxExperts && kSortThreads >= kMaxExperts && kFewThreads >= kFewExperts);

// By a warp, for one of the rows: calls take(j, expert) in a lane of its own for each that it takes. kEach: scores of a
// lane at most.
template <class T, int kEach, class Take>
__device__ void choose(const MoeRouteParams& p, int64_t row, Take take) {
  const int lane = lane_id(), experts = static_cast<int>(p.experts), taken = static_cast<int>(p.taken);
  const T* const scores = static_cast<const T*>(p.scores) + row * p.scores_stride;
  uint32_t keys[kEach], largest = 0;  // 0 is less than any score's
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = i * kWarp + lane;
    keys[i] = expert < experts ? order_key(to_float(scores[expert])) : 0;
    largest = max(largest, keys[i]);
  }
  const float best = key_float(__reduce_max_sync(kFullMask, largest));
  float sum = 0;
  if (!p.normalised) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += keys[i] > 0 ? score_weight(key_float(keys[i]), best) : 0;
    sum = warp_sum(sum);
  }

  uint32_t key = 0;
  int mine = 0;  // what this lane, by its number, is the place of
  for (int j = 0; j < taken; ++j) {
    uint32_t of_lane = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (keys[i] <= of_lane) continue;
      of_lane = keys[i], at = i;
    }
    const uint32_t top = __reduce_max_sync(kFullMask, of_lane);
    const uint32_t expert = __reduce_min_sync(kFullMask, of_lane == top ? at * kWarp + lane : ~0u);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (expert == static_cast<uint32_t>(i * kWarp + lane)) keys[i] = 0;
    if (lane == j) key = top, mine = static_cast<int>(expert);
  }
  const float weight = lane < taken ? score_weight(key_float(key), best) : 0;
  if (p.normalised) sum = warp_sum(weight);
  if (lane >= taken) return;
  p.chosen[row * taken + lane] = mine;
  p.shares[row * taken + lane] = weight / sum;
  take(lane, mine);
}

// By a block of so many threads as there are experts, or more: `expert_of` a pair.
template <class ExpertOf>
__device__ void sort_pairs(const MoeRouteParams& p, ExpertOf expert_of) {
  __shared__ int counts[kMaxCounts];  // of each warp that takes part
  __shared__ int of_warps[kSortThreads / kWarp];
  const int threads = static_cast<int>(blockDim.x), lane = lane_id(), warp = warp_id();
  const int experts = static_cast<int>(p.experts), pairs = static_cast<int>(p.pairs());
  const int steps = (pairs + kWarp - 1) / kWarp;  // of a warp
  const int warps = max(1, min(min(threads / kWarp, kMaxCounts / experts), steps));
  const int from = static_cast<int>(int64_t{steps} * warp / warps) * kWarp;
  const int to = warp < warps ? min(static_cast<int>(int64_t{steps} * (warp + 1) / warps) * kWarp, pairs) : from;
  int* const of_warp = counts + warp * experts;
  for (int i = threadIdx.x; i < warps * experts; i += threads) counts[i] = 0;
  __syncthreads();
  for (int pair = from + lane; pair < to; pair += kWarp) atomicAdd(&of_warp[expert_of(pair)], 1);
  __syncthreads();

  const int expert = static_cast<int>(threadIdx.x);
  int mine = 0;
  if (expert < experts)
    for (int w = 0; w < warps; ++w) mine += counts[w * experts + expert];
  int end = sum_up_to_lane(mine);
  if (lane == kWarp - 1) of_warps[warp] = end;
  __syncthreads();
  for (int w = 0; w < warp; ++w) end += of_warps[w];
  if (expert < experts) {
    p.ends[expert] = end;
    int begin = end - mine;
    for (int w = 0; w < warps; ++w) {
      int& count = counts[w * experts + expert];
      begin += count;
      count = begin - count;
    }
  }
  __syncthreads();

  for (int at = from; at < to; at += kWarp) {
    const int pair = at + lane, of_pair = pair < to ? expert_of(pair) : -1;
    const uint32_t alike = __match_any_sync(kFullMask, of_pair);
    const int before = __popc(alike & ((1u << lane) - 1));
    const int begin = of_pair >= 0 ? of_warp[of_pair] : 0;
    __syncwarp();
    if (of_pair >= 0) {
      p.order[begin + before] = pair;
      if (before == 0) of_warp[of_pair] = begin + __popc(alike);
    }
    __syncwarp();
  }
}

template <class T, int kEach>
__global__ void __launch_bounds__(kFewThreads) route_few_kernel(MoeRouteParams p) {
  __shared__ uint16_t chosen[kFewRows * kMaxTaken];
  begin_kernel();
  const int taken = static_cast<int>(p.taken);
  for (int row = warp_id(); row < p.rows; row += static_cast<int>(blockDim.x) / kWarp)
    choose<T, kEach>(p, row, [&](int j, int expert) { chosen[row * taken + j] = static_cast<uint16_t>(expert); });
  __syncthreads();
  sort_pairs(p, [&](int pair) { return static_cast<int>(chosen[pair]); });
}

template <class T, int kEach>
__global__ void __launch_bounds__(kChoiceThreads) choose_kernel(MoeRouteParams p) {
  begin_kernel();
  const int64_t row = int64_t{blockIdx.x} * (kChoiceThreads / kWarp) + warp_id();
  if (row < p.rows) choose<T, kEach>(p, row, [](int, int) {});
}

__global__ void __launch_bounds__(kSortThreads) sort_kernel(MoeRouteParams p) {
  begin_kernel();
  sort_pairs(p, [&](int pair) { return static_cast<int>(p.chosen[pair]); });
}

template <class T, int kEach>
void start_few(const MoeRouteParams& p, Stream stream) {
  const int64_t warps = std::max((p.experts + kWarp - 1) / kWarp, std::min<int64_t>(p.rows, kFewThreads / kWarp));
  launch("moe_route", route_few_kernel<T, kEach>, {.grid = 1, .threads = static_cast<unsigned>(warps * kWarp)}, stream,
         p);
}

template <class T, int kEach>
void start_many(const MoeRouteParams& p, Stream stream) {
  constexpr int64_t kRows = kChoiceThreads / kWarp;
  if (p.rows > 0)  // without any, all ends are 0
    launch("moe_route", choose_kernel<T, kEach>,
           {.grid = grid_x("moe_route", (p.rows + kRows - 1) / kRows), .threads = kChoiceThreads}, stream, p);
  launch("moe_route", sort_kernel, {.grid = 1, .threads = kSortThreads}, stream, p);
}

}  // namespace

void moe_route_cuda(const MoeRouteParams& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() {
    if (p.rows <= kFewRows && p.experts <= kFewExperts)
      return p.experts <= 4 * kWarp ? start_few<T, 4>(p, stream) : start_few<T, 8>(p, stream);
    p.experts <= 8 * kWarp ? start_many<T, 8>(p, stream) : start_many<T, 32>(p, stream);
  });
}

}  // namespace specdec::layers
