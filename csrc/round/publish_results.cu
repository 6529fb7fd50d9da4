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
  const int64_t number = *p.num_published;
  int32_t* record = p.results + ring_row(number, p.depth) * p.words;
  const int64_t width = p.layout.row_words(), score_words = p.layout.score_words();
  for (int64_t i = threadIdx.x; i < p.batch * width; i += kThreads)
    record[ResultLayout::kRows + i] = result_word(p, i / width, i % width);
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
