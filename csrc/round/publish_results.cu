// One block, a thread a word, written straight into host memory: posted writes, so the kernel waits for the bus only
// once, at the fence before the number that says that all is there.
#include "core/cuda.cuh"
#include "round/clock.h"
#include "round/publish_results.h"

namespace specdec {
namespace {

constexpr int kThreads = 512;

__global__ void __launch_bounds__(kThreads) publish_results_kernel(PublishResultsParams p) {
  begin_kernel();
  const int64_t number = *p.num_published;
  int32_t* record = p.results + ring_row(number, p.depth) * p.words;
  const int64_t width = p.layout.row_words();
  for (int64_t i = threadIdx.x; i < p.batch * width; i += kThreads)
    record[ResultLayout::kRows + i] = result_word(p, i / width, i % width);
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

}  // namespace specdec
