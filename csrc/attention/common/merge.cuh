// Split-KV reduction: merges the partial results of items whose KV several workers read.
//
// Each worker stores its partial results in the workspace and increments the item's counter. After its whole share, it
// waits for the other workers of its first and last item, and merges some of their rows. Partial results are merged in
// KV order, so that equal calls give equal bits. Waiting cannot deadlock: a cooperative launch runs all blocks at once,
// and each block has stored everything it has before it waits. Traffic: partial results once each way, through the L2.
#pragma once

#include <cuda/atomic>

#include "attention/common/softmax.cuh"

namespace specdec::attention {

// Return where a partial result is stored. Per row tile: unnormalized outputs [rows, D], maxima [rows], sums of weights
// [rows]. An item's first partial result is followed by the counter of workers that have stored theirs, or by one
// counter per row if clusters share the item.
__device__ __forceinline__ float* partial_of(const AttentionCall& p, const DevicePlan& plan, int64_t number,
                                             int row_tile, int D) {
  return p.workspace +
         (number * plan.row_tiles + row_tile) * partial_floats(plan.tile_rows, plan.cluster_blocks != 0, D);
}

// Count the workers that have stored their partial results of an item, then those that have seen the count complete.
//
// A word that is not a counter was written by someone else since the last call, and counts as zero, so that the
// workspace needs no initialization. The upper half of a counter is a signaling NaN, a float that no arithmetic
// produces.
class PartialsCounter {
 public:
  __device__ PartialsCounter(const AttentionCall& p, const DevicePlan& plan, const Segment& s, int row_tile, int D,
                             int row = 0)
      : at_(reinterpret_cast<uint64_t*>(partial_of(p, plan, s.first_partial, row_tile, D) +
                                        int64_t{plan.tile_rows} * (D + 2)) +
            row),
        workers_(s.workers) {}
  __device__ PartialsCounter(uint64_t* at, unsigned workers) : at_(at), workers_(workers) {}

  // Increment the counter and return how many workers have arrived. A thread that waits for the counter, or arrives
  // after this one, sees what this block wrote before. Call from one thread, after a block barrier.
  __device__ unsigned arrive() {
    uint64_t word = count().fetch_add(1, cuda::std::memory_order_acq_rel);
    if (is_counter(word)) return static_cast<unsigned>(word) + 1;
    ++word;
    uint64_t next_word;
    do next_word = is_counter(word) ? word + 1 : kEmpty + 1;
    while (!count().compare_exchange_strong(word, next_word, cuda::std::memory_order_acq_rel));
    return static_cast<unsigned>(next_word);
  }
  // Like arrive(), where nobody waits: return whether all others have arrived before. The last one resets the counter
  // for the next call.
  __device__ bool arrive_and_check_last() {
    const bool last = arrive() == workers_;
    if (last) count().store(kEmpty, cuda::std::memory_order_relaxed);
    return last;
  }
  // Wait until all workers have arrived, and make what they wrote visible. Call from one thread.
  __device__ void wait() {
    while (static_cast<unsigned>(*static_cast<volatile uint64_t*>(at_)) < workers_) __nanosleep(20);
    __threadfence();
  }
  // Count a worker that has seen all partial results; the last one resets the counter for the next call.
  __device__ void depart() {
    if (static_cast<unsigned>(count().fetch_add(1, cuda::std::memory_order_relaxed)) + 1 == 2 * workers_)
      count().store(kEmpty, cuda::std::memory_order_relaxed);
  }

 private:
  static constexpr uint64_t kEmpty = uint64_t{0x7fa3c5e1} << 32;
  __device__ static bool is_counter(uint64_t word) { return word >> 32 == kEmpty >> 32; }
  __device__ cuda::atomic_ref<uint64_t, cuda::thread_scope_device> count() const {
    return cuda::atomic_ref<uint64_t, cuda::thread_scope_device>(*at_);
  }

  uint64_t* at_;
  unsigned workers_;
};

// Merged partial results of one row, relative to their common maximum. Lane l holds columns 4 l to 4 l + 3 of every
// 128, as far as there are that many.
template <int D>
struct PartialRow {
  static constexpr int kVectors = (D + 127) / 128;
  float row_max = -INFINITY, row_sum = 0;
  float4 x[kVectors]{};

  __device__ static bool has_columns() { return D % 128 == 0 || threadIdx.x % kWarp * 4 < D; }

  __device__ void scale(float factor) {
#pragma unroll
    for (auto& v : x) v.x *= factor, v.y *= factor, v.z *= factor, v.w *= factor;
  }
  __device__ void add(const PartialRow& other) {
    const float next_max = fmaxf(row_max, other.row_max), origin = next_max == -INFINITY ? 0 : next_max;
    const float mine = exp2_fast(row_max - origin), theirs = exp2_fast(other.row_max - origin);
    row_max = next_max;
    row_sum = row_sum * mine + other.row_sum * theirs;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      x[v].x = x[v].x * mine + other.x[v].x * theirs, x[v].y = x[v].y * mine + other.x[v].y * theirs;
      x[v].z = x[v].z * mine + other.x[v].z * theirs, x[v].w = x[v].w * mine + other.x[v].w * theirs;
    }
  }

  // Load row `row` of a partial result, past the L1, because other SMs wrote it.
  __device__ void load(const float* partial, int rows, int row) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (has_columns()) x[v] = __ldcg(reinterpret_cast<const float4*>(partial + row * D + 4 * lane + 128 * v));
    row_max = __ldcg(partial + rows * D + row);
    row_sum = __ldcg(partial + rows * (D + 1) + row);
  }
  __device__ void store(float* partial, int rows, int row) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (has_columns()) *reinterpret_cast<float4*>(partial + row * D + 4 * lane + 128 * v) = x[v];
    if (lane == 0) {
      partial[rows * D + row] = row_max;
      partial[rows * (D + 1) + row] = row_sum;
    }
  }
};

// Write row n of a request and KV head to out and lse.
template <class T, int D>
__device__ void write_row(const AttentionCall& p, const DevicePlan& plan, const Request& r, int head, int n,
                          PartialRow<D> sum) {
  const int lane = threadIdx.x % kWarp;
  const QueryRow at = query_row(plan, head, n);
  sum.scale(sum.row_sum == 0 ? 0 : p.v_scale / sum.row_sum);
#pragma unroll
  for (int v = 0; v < PartialRow<D>::kVectors; ++v)
    if (PartialRow<D>::has_columns()) store_out<T>(p, r, at, 4 * lane + 128 * v, sum.x[v]);
  if (lane == 0) store_lse(p, r, at, sum.row_max, sum.row_sum);
}

// Merge rows first, first + step, ... < count of a row tile, with one warp. Process several rows and partial results at
// once, so that their loads are in flight together.
template <class T, int D, int kRowsPerStep, int kPartsPerStep>
__device__ __forceinline__ void merge_rows(const AttentionCall& p, const DevicePlan& plan, const Segment& s,
                                           int row_tile, int first, int step, int count) {
  const int first_row = s.first_row + row_tile * plan.tile_rows;
#pragma unroll 1
  for (int row = first; row < count; row += kRowsPerStep * step) {
    PartialRow<D> sums[kRowsPerStep];
#pragma unroll 1
    for (int j = 0; j < s.splits; j += kPartsPerStep) {
      PartialRow<D> some[kPartsPerStep][kRowsPerStep];
#pragma unroll
      for (int k = 0; k < kPartsPerStep; ++k) {
        const int at = p.fixed_split || j + k == 0 ? s.first_partial + j + k : s.first_partial + 2 * (j + k) - 1;
        const float* partial = partial_of(p, plan, at, row_tile, D);
#pragma unroll
        for (int i = 0; i < kRowsPerStep; ++i)
          if (j + k < s.splits && row + i * step < count) some[k][i].load(partial, plan.tile_rows, row + i * step);
      }
#pragma unroll
      for (int k = 0; k < kPartsPerStep; ++k)
#pragma unroll
        for (int i = 0; i < kRowsPerStep; ++i) sums[i].add(some[k][i]);
    }
#pragma unroll
    for (int i = 0; i < kRowsPerStep; ++i)
      if (row + i * step < count) write_row<T>(p, plan, s.request, s.kv_head, first_row + row + i * step, sums[i]);
  }
}

// Count this worker as arrived after it has stored its last partial result of an item. Call from all consumer threads,
// which meet in sync().
template <int D, class Sync>
__device__ __forceinline__ void publish_partial(const AttentionCall& p, const DevicePlan& plan, const Segment& s,
                                                int row_tile, Sync&& sync) {
  sync();
  if (s.workers > 1 && threadIdx.x == 0) PartialsCounter(p, plan, s, row_tile, D).arrive();
}

// Merge this worker's rows of an item. Call from the same threads.
template <class T, int D, int kThreads, class Sync>
__device__ __forceinline__ void merge_item(const AttentionCall& p, const DevicePlan& plan, const Segment& s,
                                           int row_tile, Sync&& sync) {
  constexpr int kLoads = 16 / PartialRow<D>::kVectors;
  PartialsCounter counter(p, plan, s, row_tile, D);
  const bool waits = s.workers > 1 && threadIdx.x == 0;
  if (waits) counter.wait();
  sync();
  const int count =
      min(plan.tile_rows, s.request.valid_rows * plan.gqa_group.divisor - s.first_row - row_tile * plan.tile_rows);
  const int first = s.rank + static_cast<int>(threadIdx.x) / kWarp * s.workers, step = kThreads / kWarp * s.workers;
  if (s.splits > 8)
    merge_rows<T, D, 1, kLoads>(p, plan, s, row_tile, first, step, count);
  else if (s.splits > 4)
    merge_rows<T, D, kLoads / 8, 8>(p, plan, s, row_tile, first, step, count);
  else
    merge_rows<T, D, kLoads / 4, 4>(p, plan, s, row_tile, first, step, count);
  if (waits) counter.depart();
}

// Write zeros to the rows after the last packed request, distributed over all blocks of the call.
template <class T, int D, int kWarps>
__device__ void write_padding_rows(const AttentionCall& p, const DevicePlan& plan, unsigned thread = threadIdx.x) {
  const Request r = load_request(p, p.batch);
  const int count = r.rows * plan.gqa_group.divisor;
  const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  for (int64_t n = int64_t{block} * kWarps + thread / kWarp; n < count * p.kv_heads; n += int64_t{blocks} * kWarps)
    write_row<T>(p, plan, r, static_cast<int>(n / count), static_cast<int>(n % count), PartialRow<D>());
}

// Write what no segment covers, distributed over all blocks of the call: the status of requests, and rows without
// visible KV. Call from kThreads threads of each block, numbered by `thread`.
template <class T, int D, int kThreads>
__device__ void write_rows_without_kv(const AttentionCall& p, const DevicePlan& plan, unsigned thread = threadIdx.x) {
  constexpr int kWarps = kThreads / kWarp;
  const int batch = static_cast<int>(p.batch), tile = plan.tile_rows * plan.row_tiles;
  const int slices = batch > 0 ? max(static_cast<int>(gridDim.x) / batch, 1) : 0;
  for (int64_t item = blockIdx.x; item < int64_t{batch} * slices; item += gridDim.x) {
    const Request r = load_request(p, item / slices);
    const int slice = static_cast<int>(item % slices), warp = thread / kWarp;
    if (slice == 0 && thread == 0 && r.status != 0) set_status(p.status, r.slot, r.status);
    const int valid = r.valid_rows * plan.gqa_group.divisor, end = r.rows * plan.gqa_group.divisor;
    for (int first = 0; first < end; first = first < valid ? min(first + tile, valid) : end) {
      if (first < valid && units_in(p, plan, tiles_of(p, plan, r, first), true) > 0) continue;
      const int count = (first < valid ? min(first + tile, valid) : end) - first;
      for (int n = slice * kWarps + warp; n < count * p.kv_heads; n += slices * kWarps)
        write_row<T>(p, plan, r, n / count, first + n % count, PartialRow<D>());
    }
  }
  if (p.cu_seqlens_q != nullptr) write_padding_rows<T, D, kWarps>(p, plan, thread);
}

}  // namespace specdec::attention
