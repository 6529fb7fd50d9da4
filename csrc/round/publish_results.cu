// Uses one block: one thread per word and one warp per row of scores. They write straight into host memory. The writes
// are posted, so the kernel waits for the bus only once, at the fence before the number that publishes the record.
#include "core/cuda.cuh"
#include "round/clock.h"
#include "round/publish_results.h"

namespace specdec::round {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;

__global__ void __launch_bounds__(kThreads) publish_results_kernel(PublishResultsParams p) {
  begin_kernel();
  __shared__ LevelCounts counts;
  const int64_t num_levels = p.layout.num_levels;
  if (threadIdx.x < kMaxLevels) counts.predicted[threadIdx.x] = counts.observed[threadIdx.x] = 0;
  if (threadIdx.x == 0) counts.num_continuing = 0;
  __syncthreads();
  for (int64_t b = threadIdx.x; b < p.batch; b += kThreads)
    if (continues(p, b)) atomicAdd(&counts.num_continuing, 1);
  const auto nodes = static_cast<int>(p.nodes), tokens = static_cast<int>(p.layout.accept_width);
  const auto batch = static_cast<int>(num_levels > 0 ? p.batch : 0);
  for (int i = static_cast<int>(threadIdx.x); i < batch * nodes; i += kThreads) {
    const int b = i / nodes, node = i % nodes;
    if (node == 0 || !continues(p, b) || node >= nodes_of(p, b)) continue;
    const int64_t level = first_level(p, b, node);
    if (level < num_levels)
      atomicAdd(reinterpret_cast<unsigned long long*>(&counts.predicted[level]), weight_of(p.node_scores[i]));
  }
  for (int i = static_cast<int>(threadIdx.x); i < batch * tokens; i += kThreads) {
    const int b = i / tokens;
    int32_t node;
    if (!continues(p, b) || !is_draft(p, b, i % tokens, node)) continue;
    const int64_t level = first_level(p, b, node);
    if (level < num_levels) atomicAdd(&counts.observed[level], 1);
  }
  __syncthreads();
  const int64_t number = *p.num_published;
  int32_t* record = p.results + ring_row(number, p.depth) * p.words;
  const int64_t width = p.layout.row_words(), score_words = p.layout.score_words();
  for (int64_t i = threadIdx.x; i < p.batch * width; i += kThreads)
    record[p.layout.row(0) + i] = result_word(p, i / width, i % width);
  if (threadIdx.x < num_levels) write_level(p, record, threadIdx.x, counts);
  if (threadIdx.x == 0) record[ResultLayout::kNumContinuing] = counts.num_continuing;
  // Scores: every warp scans the same rows, and the warps take turns at those that have scores.
  const int64_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int64_t seen = 0;
  for (int64_t first = 0; first < p.batch && score_words > 0; first += kWarp) {
    const bool mine = first + lane < p.batch && has_scores(p, first + lane);
    for (unsigned rows = __ballot_sync(kFullMask, mine); rows != 0; rows &= rows - 1) {
      if (seen++ % kWarps != warp) continue;
      const int64_t b = first + __ffs(static_cast<int>(rows)) - 1;
#pragma unroll 4
      for (int64_t i = lane; i < score_words; i += kWarp) record[p.layout.scores(b, p.words) + i] = score_word(p, b, i);
    }
  }
  if (threadIdx.x == 0) {
    auto* times = reinterpret_cast<int64_t*>(record + ResultLayout::kStarted);
    times[0] = *p.started_at;
    times[1] = nanoseconds();
  }
  __threadfence_system();
  __syncthreads();  // the words of all threads have arrived
  if (threadIdx.x == 0) {
    *p.num_published = number + 1;
    *static_cast<volatile int32_t*>(record + ResultLayout::kNumber) = done_mark(number);
  }
}

}  // namespace

void publish_results_cuda(const PublishResultsParams& p, Stream stream) {
  launch("publish_results", publish_results_kernel, {.grid = 1, .threads = kThreads}, stream, p);
}

}  // namespace specdec::round
