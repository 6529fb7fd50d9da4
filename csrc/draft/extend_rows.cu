// A thread a row. A few dozen bytes each: the launch is the cost, then two reads in a row, the slot and its length.
#include "core/cuda.cuh"
#include "draft/extend_rows.h"

namespace specdec::draft {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) extend_rows_kernel(ExtendRowsParams p) {
  begin_kernel();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < p.batch * p.width) write_extend_row(p, i / p.width, i % p.width);
}

}  // namespace

void extend_rows_cuda(const ExtendRowsParams& p, Stream stream) {
  const unsigned blocks = grid_x("extend_rows", (p.batch * p.width + kThreads - 1) / kThreads);
  launch("extend_rows", extend_rows_kernel, {.grid = blocks, .threads = kThreads}, stream, p);
}

}  // namespace specdec::draft
