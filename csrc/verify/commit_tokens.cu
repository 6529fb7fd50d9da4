// One thread a request. Reads and writes a few dozen bytes of tokens and state each: the launch is the cost.
#include "core/cuda.cuh"
#include "verify/commit_row.h"

namespace specdec {
namespace {

constexpr int kThreads = 64;

__global__ void __launch_bounds__(kThreads) commit_tokens_kernel(CommitTokensParams p) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b < p.batch) commit_row(p, b);
}

}  // namespace

void commit_tokens_cuda(const CommitTokensParams& p, Stream stream) {
  const unsigned blocks = grid_x("commit_tokens", (p.batch + kThreads - 1) / kThreads);
  commit_tokens_kernel<<<blocks, kThreads, 0, stream>>>(p);
  SD_LAUNCH_CHECK("commit_tokens");
}

}  // namespace specdec
