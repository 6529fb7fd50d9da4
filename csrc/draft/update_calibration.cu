// One block: a thread a node counts in shared memory, in integers; then a warp a depth finds its scaling, a lane a bin.
// Reads some 20 bytes a node and the paths of requests; latency bound: divisions in float64 above all, hence the lanes.
#include "core/cuda.cuh"
#include "core/warp.cuh"
#include "draft/update_calibration.h"

namespace specdec::draft {
namespace {

constexpr int kThreads = 512, kSums = kCalibrationBins * kCalibrationSums;
static_assert(kCalibrationBins <= kWarp);

// The sum over the lanes of the bins and what it begins with, in the order of bins, as on the CPU.
__device__ Descent sum_in_order(Descent sum, const Descent& own) {
#pragma unroll
  for (int bin = 0; bin < kCalibrationBins; ++bin)
    sum.add({__shfl_sync(kFullMask, own.by_slope, bin), __shfl_sync(kFullMask, own.by_offset, bin),
             __shfl_sync(kFullMask, own.slope2, bin), __shfl_sync(kFullMask, own.offset2, bin),
             __shfl_sync(kFullMask, own.both, bin)});
  return sum;
}

// A depth of which something was seen has new counts and a new scaling. All lanes of a warp.
__device__ void learn_depth(const UpdateCalibrationParams& p, int64_t depth, const int64_t* more) {
  const int lane = lane_id();
  int64_t* const counts = p.counts + depth * kSums + lane * kCalibrationSums;
  BinCounts bin{}, seen{};
  if (lane < kCalibrationBins) {
    bin = BinCounts::of(counts);
    seen = BinCounts::of(more + lane * kCalibrationSums);
  }
  if (__ballot_sync(kFullMask, seen.nodes > 0) == 0) return;
  bin.add(seen);
  bin.fade(static_cast<int64_t>(warp_sum(static_cast<uint64_t>(bin.nodes))));
  if (lane < kCalibrationBins) bin.store(counts);
  float* const platt = p.table + 2 * depth;
  Fit fit{platt[0], platt[1]};
  for (int step = 0; step < kDescents; ++step) fit.step(sum_in_order(fit.of_prior(), fit.of_bin(bin)));
  if (lane > 0) return;
  platt[0] = static_cast<float>(fit.slope);
  platt[1] = static_cast<float>(fit.offset);
}

__global__ void __launch_bounds__(kThreads) update_calibration_kernel(UpdateCalibrationParams p) {
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
  for (int64_t depth = warp_id(); depth < p.depths; depth += kThreads / kWarp)
    learn_depth(p, depth, more + depth * kSums);
}

}  // namespace

void update_calibration_cuda(const UpdateCalibrationParams& p, Stream stream) {
  launch("update_calibration", update_calibration_kernel, {.grid = 1, .threads = kThreads}, stream, p);
}

}  // namespace specdec::draft
