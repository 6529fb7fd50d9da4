// MoE routing: top-k experts per row, softmax or sigmoid weights, and (row, expert) pairs sorted by expert.
//
// Selection: one warp per row. Lanes hold the scores as ordered integers; those of all but the best groups are removed;
// top_k times, the maximum over all lanes is found and removed. Sorting: one block, by counting. Each warp owns a
// contiguous range of pairs, counts them by expert, and derives from all warps' counts where to put them. With few
// pairs, each pair and each expert counts the pairs before it instead, without barriers. Few rows take one launch,
// whose block selects and sorts; with many rows or experts, a first kernel of many blocks selects.
//
// Scores are read once. With few rows latency dominates: about thirty instructions per selected expert.
#include <algorithm>

#include "core/warp.cuh"
#include "layers/moe/moe_grouped_gemm.h"
#include "layers/moe/moe_route.h"

namespace specdec::layers {
namespace {

constexpr int kSortThreads = 1024, kSelectThreads = 256;
constexpr int kFewRows = 16, kFewExperts = 512;  // a warp for each row
constexpr int kFewPairs = 64;
constexpr int kFewThreads = kFewExperts + kMaxTopK;  // a thread for each expert, shared ones included
constexpr int kMaxCounts = 8192;                     // warps * experts
static_assert(kMaxCounts >= kMaxExperts && kSortThreads >= kMaxExperts && kFewThreads >= kFewRows * kWarp);
static_assert(kFewThreads % kWarp == 0 && kMaxTopK <= kWarp);

// Remove the keys of all but a row's best groups; called by one warp.
template <int kScoresPerLane>
__device__ void keep_best_groups(const MoeRouteParams& p, uint32_t (&keys)[kScoresPerLane]) {
  const int lane = lane_id(), each = static_cast<int>(p.experts / p.n_group);
  uint32_t group = 0;  // lane g has the key of group g's score
  for (int g = 0; g < p.n_group; ++g) {
    uint32_t best = 0, second = 0;  // of this lane
#pragma unroll
    for (int i = 0; i < kScoresPerLane; ++i) {
      const int in_group = i * kWarp + lane - g * each;
      if (in_group < 0 || in_group >= each) continue;
      second = max(second, min(best, keys[i]));
      best = max(best, keys[i]);
    }
    const uint32_t top = __reduce_max_sync(kFullMask, best);
    const bool has_top = lane == __ffs(__ballot_sync(kFullMask, best == top)) - 1;
    const uint32_t next = __reduce_max_sync(kFullMask, has_top ? second : best);
    if (lane == g) group = order_key(group_score(p, key_float(top), key_float(next)));
  }
  uint32_t kept = 0;  // bit g: group g
  for (int n = 0; n < p.topk_group; ++n) {
    const int g = __ffs(__ballot_sync(kFullMask, group == __reduce_max_sync(kFullMask, group))) - 1;
    kept |= 1u << g;
    if (lane == g) group = 0;
  }
#pragma unroll
  for (int i = 0; i < kScoresPerLane; ++i)
    if (const int expert = i * kWarp + lane; expert < p.experts && !(kept >> expert / each & 1)) keys[i] = 0;
}

// Select a row's experts; called by one warp. Lane j calls emit(j, expert) for the j-th best expert, the lanes after
// them for the shared ones.
template <class T, int kScoresPerLane, bool kSigmoid, class Emit>
__device__ void select_experts(const MoeRouteParams& p, int64_t row, Emit emit) {
  const int lane = lane_id(), experts = static_cast<int>(p.experts), top_k = static_cast<int>(p.top_k);
  const int columns = static_cast<int>(p.columns());
  const T* const scores = static_cast<const T*>(p.scores) + row * p.scores_stride;
  const float gate_score = shared_gate_score<T>(p, row);
  uint32_t keys[kScoresPerLane], largest = 0;  // 0 is below any score's key
#pragma unroll
  for (int i = 0; i < kScoresPerLane; ++i) {
    const int expert = i * kWarp + lane;
    if constexpr (kSigmoid) {
      keys[i] = expert < experts ? order_key(sigmoid_choice(p, to_float(scores[expert]), expert)) : 0;
    } else {
      keys[i] = expert < experts ? order_key(to_float(scores[expert])) : 0;
      largest = max(largest, keys[i]);
    }
  }
  const float best = kSigmoid ? 0 : key_float(__reduce_max_sync(kFullMask, largest));
  float sum = 0;
  if (!kSigmoid && !p.renormalize) {
#pragma unroll
    for (int i = 0; i < kScoresPerLane; ++i) sum += keys[i] > 0 ? score_weight(key_float(keys[i]), best) : 0;
    sum = warp_sum(sum);
  }
  if (p.n_group > 1) keep_best_groups(p, keys);

  uint32_t key = 0;
  int selected = 0;  // lane j keeps the j-th best
  for (int j = 0; j < top_k; ++j) {
    uint32_t lane_best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kScoresPerLane; ++i) {
      if (keys[i] <= lane_best) continue;
      lane_best = keys[i], at = i;
    }
    const uint32_t top = __reduce_max_sync(kFullMask, lane_best);
    const uint32_t expert = __reduce_min_sync(kFullMask, lane_best == top ? at * kWarp + lane : ~0u);
#pragma unroll
    for (int i = 0; i < kScoresPerLane; ++i)
      if (expert == static_cast<uint32_t>(i * kWarp + lane)) keys[i] = 0;
    if (lane == j) key = top, selected = static_cast<int>(expert);
  }
  float weight = 0;
  if (lane < top_k) {
    if constexpr (kSigmoid)
      weight = sigmoid_weight(to_float(scores[selected]));
    else
      weight = score_weight(key_float(key), best);
  }
  if (p.renormalize) sum = warp_sum(weight);
  if (lane >= columns) return;
  if constexpr (kSigmoid)
    weight = (p.renormalize ? weight / (sum + p.eps) : weight) * p.scale;
  else
    weight = weight / sum * p.scale;
  if (lane >= top_k) selected = experts + lane - top_k, weight = sigmoid(gate_score);
  p.topk_ids[row * columns + lane] = selected;
  p.topk_weights[row * columns + lane] = weight;
  emit(lane, selected);
}

// Sort all pairs by expert; called by a block of at least all_experts() threads. expert_of(pair) returns a pair's
// expert.
template <class ExpertOf>
__device__ void sort_pairs(const MoeRouteParams& p, ExpertOf expert_of) {
  __shared__ int counts[kMaxCounts];  // [participating warps, experts]
  __shared__ int warp_ends[kSortThreads / kWarp];
  const int threads = static_cast<int>(blockDim.x), lane = lane_id(), warp = warp_id();
  const int experts = static_cast<int>(p.all_experts()), pairs = static_cast<int>(p.pairs());
  const int chunks = (pairs + kWarp - 1) / kWarp;  // of 32 pairs
  const int warps = max(1, min(min(threads / kWarp, kMaxCounts / experts), chunks));
  const int from = static_cast<int>(int64_t{chunks} * warp / warps) * kWarp;
  const int to = warp < warps ? min(static_cast<int>(int64_t{chunks} * (warp + 1) / warps) * kWarp, pairs) : from;
  int* const warp_counts = counts + warp * experts;
  for (int i = threadIdx.x; i < warps * experts; i += threads) counts[i] = 0;
  __syncthreads();
  for (int pair = from + lane; pair < to; pair += kWarp) atomicAdd(&warp_counts[expert_of(pair)], 1);
  __syncthreads();

  const int expert = static_cast<int>(threadIdx.x);
  int num_pairs = 0;
  if (expert < experts)
    for (int w = 0; w < warps; ++w) num_pairs += counts[w * experts + expert];
  int end = sum_up_to_lane(num_pairs);
  if (lane == kWarp - 1) warp_ends[warp] = end;
  __syncthreads();
  for (int w = 0; w < warp; ++w) end += warp_ends[w];
  if (expert < experts) {
    p.expert_ends[expert] = end;
    int begin = end - num_pairs;
    for (int w = 0; w < warps; ++w) {
      int& count = counts[w * experts + expert];
      begin += count;
      count = begin - count;
    }
  }
  __syncthreads();

  for (int at = from; at < to; at += kWarp) {
    const int pair = at + lane, expert_id = pair < to ? expert_of(pair) : -1;
    const uint32_t same_expert = __match_any_sync(kFullMask, expert_id);
    const int before = __popc(same_expert & ((1u << lane) - 1));
    const int begin = expert_id >= 0 ? warp_counts[expert_id] : 0;
    __syncwarp();
    if (expert_id >= 0) {
      p.sorted_pairs[begin + before] = pair;
      if (before == 0) warp_counts[expert_id] = begin + __popc(same_expert);
    }
    __syncwarp();
  }
}

// Sort few pairs by expert; called by a block. expert_of(pair) returns a pair's expert.
template <class ExpertOf>
__device__ void sort_few_pairs(const MoeRouteParams& p, ExpertOf expert_of) {
  const int experts = static_cast<int>(p.all_experts()), pairs = static_cast<int>(p.pairs());
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  for (int expert = thread; expert < experts; expert += threads) {
    int end = 0;
    for (int pair = 0; pair < pairs; ++pair) end += expert_of(pair) <= expert;
    p.expert_ends[expert] = end;
  }
  for (int pair = thread; pair < pairs; pair += threads) {
    const int expert = expert_of(pair);
    int place = 0;
    for (int other = 0; other < pairs; ++other)
      place += expert_of(other) < expert || (expert_of(other) == expert && other < pair);
    p.sorted_pairs[place] = pair;
  }
}

template <class T, int kScoresPerLane, bool kSigmoid>
__global__ void __launch_bounds__(kFewThreads) route_few_kernel(MoeRouteParams p) {
  __shared__ uint16_t topk_ids[kFewRows * kMaxTopK];
  begin_kernel();
  const int columns = static_cast<int>(p.columns());
  for (int row = warp_id(); row < p.rows; row += static_cast<int>(blockDim.x) / kWarp)
    select_experts<T, kScoresPerLane, kSigmoid>(
        p, row, [&](int j, int expert) { topk_ids[row * columns + j] = static_cast<uint16_t>(expert); });
  __syncthreads();
  const auto expert_of = [&](int pair) { return static_cast<int>(topk_ids[pair]); };
  p.pairs() <= kFewPairs ? sort_few_pairs(p, expert_of) : sort_pairs(p, expert_of);
}

template <class T, int kScoresPerLane, bool kSigmoid>
__global__ void __launch_bounds__(kSelectThreads) select_experts_kernel(MoeRouteParams p) {
  begin_kernel();
  const int64_t row = int64_t{blockIdx.x} * (kSelectThreads / kWarp) + warp_id();
  if (row < p.rows) select_experts<T, kScoresPerLane, kSigmoid>(p, row, [](int, int) {});
}

__global__ void __launch_bounds__(kSortThreads) sort_pairs_kernel(MoeRouteParams p) {
  begin_kernel();
  sort_pairs(p, [&](int pair) { return static_cast<int>(p.topk_ids[pair]); });
}

template <class T, int kScoresPerLane, bool kSigmoid>
void start_few(const MoeRouteParams& p, Stream stream) {
  const int64_t warps = std::max((p.all_experts() + kWarp - 1) / kWarp, std::min<int64_t>(p.rows, kFewRows));
  launch("moe_route", route_few_kernel<T, kScoresPerLane, kSigmoid>,
         {.grid = 1, .threads = static_cast<unsigned>(warps * kWarp)}, stream, p);
}

template <class T, int kScoresPerLane, bool kSigmoid>
void start_many(const MoeRouteParams& p, Stream stream) {
  constexpr int64_t kRows = kSelectThreads / kWarp;
  if (p.rows > 0)  // else the sort alone sets all ends to 0
    launch("moe_route", select_experts_kernel<T, kScoresPerLane, kSigmoid>,
           {.grid = grid_x("moe_route", (p.rows + kRows - 1) / kRows), .threads = kSelectThreads}, stream, p);
  launch("moe_route", sort_pairs_kernel, {.grid = 1, .threads = kSortThreads}, stream, p);
}

template <class T, bool kSigmoid>
void start(const MoeRouteParams& p, Stream stream) {
  if (p.rows <= kFewRows && p.experts <= kFewExperts)
    return p.experts <= 4 * kWarp   ? start_few<T, 4, kSigmoid>(p, stream)
           : p.experts <= 8 * kWarp ? start_few<T, 8, kSigmoid>(p, stream)
                                    : start_few<T, 16, kSigmoid>(p, stream);
  p.experts <= 8 * kWarp ? start_many<T, 8, kSigmoid>(p, stream) : start_many<T, 32, kSigmoid>(p, stream);
}

}  // namespace

void moe_route_cuda(const MoeRouteParams& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() { p.sigmoid ? start<T, true>(p, stream) : start<T, false>(p, stream); });
}

}  // namespace specdec::layers
