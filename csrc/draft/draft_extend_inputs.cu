// draft_extend_inputs on a GPU: one thread per row. A few dozen bytes per row: the launch dominates; then two dependent
// loads, the slot and its length.
#include "core/cuda.cuh"
#include "draft/draft_extend_inputs.h"

namespace specdec::draft {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) draft_extend_inputs_kernel(DraftExtendInputsParams p) {
  begin_kernel();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < p.batch * p.width) write_extend_row(p, i / p.width, i % p.width);
}

}  // namespace

void draft_extend_inputs_cuda(const DraftExtendInputsParams& p, Stream stream) {
  const unsigned blocks = grid_x("draft_extend_inputs", (p.batch * p.width + kThreads - 1) / kThreads);
  launch("draft_extend_inputs", draft_extend_inputs_kernel, {.grid = blocks, .threads = kThreads}, stream, p);
}

}  // namespace specdec::draft
