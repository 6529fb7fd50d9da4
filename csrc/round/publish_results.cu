// One block, a thread a word and a warp a row of scores, written straight into host memory: posted writes, so the
// kernel waits for the bus only once, at the fence before the number that says that all is there.
#include "core/cuda.cuh"
#include "round/clock.h"
#include "round/publish_results.h"

namespace specdec::round {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;

__global__ void __launch_bounds__(kThreads) publish_results_kernel(PublishResultsParams p) {
  begin_kernel();
  __shared__ Shown shown;
  const int64_t num_rungs = p.layout.num_rungs;
  if (threadIdx.x < kMostRungs) shown.expected[threadIdx.x] = shown.realised[threadIdx.x] = 0;
  if (threadIdx.x == 0) shown.going_on = 0;
  __syncthreads();
  for (int64_t b = threadIdx.x; b < p.batch; b += kThreads)
    if (goes_on(p, b)) atomicAdd(&shown.going_on, 1);
  const auto nodes = static_cast<int>(p.nodes), tokens = static_cast<int>(p.layout.accept_width);
  const auto batch = static_cast<int>(num_rungs > 0 ? p.batch : 0);
  for (int i = static_cast<int>(threadIdx.x); i < batch * nodes; i += kThreads) {
    const int b = i / nodes, node = i % nodes;
    if (node == 0 || !goes_on(p, b) || node >= nodes_of(p, b)) continue;
    const int64_t rung = first_rung(p, b, node);
    if (rung < num_rungs)
      atomicAdd(reinterpret_cast<unsigned long long*>(&shown.expected[rung]), weight_of(p.node_scores[i]));
  }
  for (int i = static_cast<int>(threadIdx.x); i < batch * tokens; i += kThreads) {
    const int b = i / tokens;
    int32_t node;
    if (!goes_on(p, b) || !is_draft(p, b, i % tokens, node)) continue;
    const int64_t rung = first_rung(p, b, node);
    if (rung < num_rungs) atomicAdd(&shown.realised[rung], 1);
  }
  __syncthreads();
  const int64_t number = *p.num_published;
  int32_t* record = p.results + ring_row(number, p.depth) * p.words;
  const int64_t width = p.layout.row_words(), score_words = p.layout.score_words();
  for (int64_t i = threadIdx.x; i < p.batch * width; i += kThreads)
    record[p.layout.row(0) + i] = result_word(p, i / width, i % width);
  if (threadIdx.x < num_rungs) write_rung(p, record, threadIdx.x, shown);
  if (threadIdx.x == 0) record[ResultLayout::kNumGoingOn] = shown.going_on;
  // Scores: every warp looks at the same rows, and the warps take turns at those that have any.
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
  __syncthreads();  // every thread's words have arrived
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
