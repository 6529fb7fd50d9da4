// update_calibration on a GPU: one block. First each thread counts nodes in smem, in integers; then one warp per depth
// refits its scaling, one lane per bin. Reads about 20 bytes per node and the requests' paths. Latency bound, mostly by
// float64 divisions, hence the lanes.
#include "core/cuda.cuh"
#include "core/warp.cuh"
#include "draft/update_calibration.h"

namespace specdec::draft {
namespace {

constexpr int kThreads = 512, kSums = kCalibrationBins * kCalibrationSums;
static_assert(kCalibrationBins <= kWarp);

// Sum the lanes of the bins and the initial value, in order of bins, as on the CPU.
__device__ Derivatives sum_in_order(Derivatives sum, const Derivatives& own) {
#pragma unroll
  for (int bin = 0; bin < kCalibrationBins; ++bin)
    sum.add({__shfl_sync(kFullMask, own.d_slope, bin), __shfl_sync(kFullMask, own.d_offset, bin),
             __shfl_sync(kFullMask, own.d2_slope, bin), __shfl_sync(kFullMask, own.d2_offset, bin),
             __shfl_sync(kFullMask, own.d2_mixed, bin)});
  return sum;
}

// Update a depth's counts and refit its scaling, if any of its nodes was observed. Called by all lanes of a warp.
__device__ void update_depth(const UpdateCalibrationParams& p, int64_t depth, const int64_t* more) {
  const int lane = lane_id();
  int64_t* const counts = p.counts + depth * kSums + lane * kCalibrationSums;
  BinCounts bin{}, observed{};
  if (lane < kCalibrationBins) {
    bin = BinCounts::of(counts);
    observed = BinCounts::of(more + lane * kCalibrationSums);
  }
  if (__ballot_sync(kFullMask, observed.nodes > 0) == 0) return;
  bin.add(observed);
  bin.decay(static_cast<int64_t>(warp_sum(static_cast<uint64_t>(bin.nodes))));
  if (lane < kCalibrationBins) bin.store(counts);
  float* const platt = p.table + 2 * depth;
  Fit fit{platt[0], platt[1]};
  for (int step = 0; step < kNewtonSteps; ++step)
    fit.step(sum_in_order(fit.prior_derivatives(), fit.bin_derivatives(bin)));
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
    const ObservedNode observed = observe_node(p, at / p.nodes, at % p.nodes);
    if (observed.bin < 0) continue;
    auto* const sums = reinterpret_cast<unsigned long long*>(more + observed.bin * kCalibrationSums);
    atomicAdd(sums, 1ull);
    if (observed.accepted) atomicAdd(sums + 1, 1ull);
    atomicAdd(sums + 2, static_cast<unsigned long long>(observed.logit));
  }
  __syncthreads();  // all threads have read the table
  for (int64_t depth = warp_id(); depth < p.depths; depth += kThreads / kWarp)
    update_depth(p, depth, more + depth * kSums);
}

}  // namespace

void update_calibration_cuda(const UpdateCalibrationParams& p, Stream stream) {
  launch("update_calibration", update_calibration_kernel, {.grid = 1, .threads = kThreads}, stream, p);
}

}  // namespace specdec::draft
