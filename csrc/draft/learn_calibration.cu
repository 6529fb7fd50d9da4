// One block: a thread a node counts in shared memory, in integers; then a thread a depth finds its scaling. Reads some
// 20 bytes a node and the paths of requests; latency bound.
#include "core/cuda.cuh"
#include "draft/learn_calibration.h"

namespace specdec::draft {
namespace {

constexpr int kThreads = 512, kSums = kCalibrationBins * kCalibrationSums;

__global__ void __launch_bounds__(kThreads) learn_calibration_kernel(LearnCalibrationParams p) {
  begin_kernel();
  __shared__ int64_t more[kMaxCalibratedDepths * kSums];
  for (int i = threadIdx.x; i < p.depths * kSums; i += kThreads) more[i] = 0;
  __syncthreads();
  for (int64_t at = threadIdx.x; at < p.batch * p.nodes; at += kThreads) {
    const SeenNode seen = seen_node(p, at / p.nodes, at % p.nodes);
    if (seen.bin < 0) continue;
    auto* const sums = reinterpret_cast<unsigned long long*>(more + seen.bin * kCalibrationSums);
    atomicAdd(sums, 1ull);
    if (seen.taken) atomicAdd(sums + 1, 1ull);
    atomicAdd(sums + 2, static_cast<unsigned long long>(seen.logit));
  }
  __syncthreads();  // the table has been read
  if (threadIdx.x < p.depths) learn_depth(p, threadIdx.x, more + threadIdx.x * kSums);
}

}  // namespace

void learn_calibration_cuda(const LearnCalibrationParams& p, Stream stream) {
  launch("learn_calibration", learn_calibration_kernel, {.grid = 1, .threads = kThreads}, stream, p);
}

}  // namespace specdec::draft
