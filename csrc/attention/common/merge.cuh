// Split-KV: merging the partial results of items whose KV several workers read. Each worker leaves its partial results
// in the workspace and counts itself in. When it has done all of its share, it waits for the other workers of its first
// and last item, and merges some of their rows. Partial results are merged in the order of the KV, so that equal calls
// give equal bits. Waiting is safe because a cooperative launch runs all blocks at once, and each has left everything
// it has before it waits. Bytes: the partial results once each way, through the L2.
#pragma once

#include <cuda/atomic>

#include "attention/common/softmax.cuh"

namespace specdec::attention {

// Where a partial result lies: for each row tile its sums [rows, D], their maxima [rows] and their sums of weights
// [rows]. Behind those of an item's first partial result stands the counter of the workers that have left theirs, or
// one for each row where clusters share the item.
__device__ __forceinline__ float* partial_of(const TreeAttentionParams& p, const DevicePlan& plan, int64_t number,
                                             int row_tile, int D) {
  return p.workspace +
         (number * plan.row_tiles + row_tile) * partial_floats(plan.tile_rows, plan.cluster_blocks != 0, D);
}

// Counts the workers that have left their partial results of an item, and then those that have seen that all are there.
// A word that is no counter was written by somebody else since the last call, and counts as zero: so the workspace
// needs no zeros. The upper half of a counter is a float that no arithmetic gives, a signalling NaN.
class PartialsCounter {
 public:
  __device__ PartialsCounter(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s, int row_tile,
                             int D, int row = 0)
      : at_(reinterpret_cast<uint64_t*>(partial_of(p, plan, s.first_partial, row_tile, D) +
                                        int64_t{plan.tile_rows} * (D + 2)) +
            row),
        workers_(s.workers) {}

  // Counts one worker in, and returns how many have arrived. Whoever waits for it, or arrives after it, sees what the
  // block wrote before. By one thread, after the block's others.
  __device__ unsigned arrive() {
    uint64_t seen = count().fetch_add(1, cuda::std::memory_order_acq_rel);
    if (counts(seen)) return static_cast<unsigned>(seen) + 1;
    ++seen;
    uint64_t next;
    do next = counts(seen) ? seen + 1 : kNobody + 1;
    while (!count().compare_exchange_strong(seen, next, cuda::std::memory_order_acq_rel));
    return static_cast<unsigned>(next);
  }
  // The same where nobody waits: returns whether all others have arrived before. The last one resets the counter for
  // the next call.
  __device__ bool arrive_last() {
    const bool last = arrive() == workers_;
    if (last) count().store(kNobody, cuda::std::memory_order_relaxed);
    return last;
  }
  __device__ void wait() {
    while (static_cast<unsigned>(*static_cast<volatile uint64_t*>(at_)) < workers_) __nanosleep(20);
    __threadfence();
  }
  // Counts those that have seen it; the last one resets the counter for the next call.
  __device__ void depart() {
    if (static_cast<unsigned>(count().fetch_add(1, cuda::std::memory_order_relaxed)) + 1 == 2 * workers_)
      count().store(kNobody, cuda::std::memory_order_relaxed);
  }

 private:
  static constexpr uint64_t kNobody = uint64_t{0x7fa3c5e1} << 32;
  __device__ static bool counts(uint64_t seen) { return seen >> 32 == kNobody >> 32; }
  __device__ cuda::atomic_ref<uint64_t, cuda::thread_scope_device> count() const {
    return cuda::atomic_ref<uint64_t, cuda::thread_scope_device>(*at_);
  }

  uint64_t* at_;
  unsigned workers_;
};

// The sum of some partial results of one row, brought to their highest maximum. Lane l holds columns 4 l to 4 l + 3 of
// every 128, where there are that many.
template <int D>
struct RowSum {
  static constexpr int kVectors = (D + 127) / 128;
  float top = -INFINITY, total = 0;
  float4 x[kVectors]{};

  __device__ static bool has_columns() { return D % 128 == 0 || threadIdx.x % kWarp * 4 < D; }

  __device__ void scale(float factor) {
#pragma unroll
    for (auto& v : x) v.x *= factor, v.y *= factor, v.z *= factor, v.w *= factor;
  }
  __device__ void add(const RowSum& other) {
    const float next_top = fmaxf(top, other.top), origin = next_top == -INFINITY ? 0 : next_top;
    const float mine = exp2_fast(top - origin), theirs = exp2_fast(other.top - origin);
    top = next_top;
    total = total * mine + other.total * theirs;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      x[v].x = x[v].x * mine + other.x[v].x * theirs, x[v].y = x[v].y * mine + other.x[v].y * theirs;
      x[v].z = x[v].z * mine + other.x[v].z * theirs, x[v].w = x[v].w * mine + other.x[v].w * theirs;
    }
  }

  // Loads row `row` of a partial result, past the L1: other multiprocessors wrote it.
  __device__ void load(const float* partial, int rows, int row) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (has_columns()) x[v] = __ldcg(reinterpret_cast<const float4*>(partial + row * D + 4 * lane + 128 * v));
    top = __ldcg(partial + rows * D + row);
    total = __ldcg(partial + rows * (D + 1) + row);
  }
  __device__ void store(float* partial, int rows, int row) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (has_columns()) *reinterpret_cast<float4*>(partial + row * D + 4 * lane + 128 * v) = x[v];
    if (lane == 0) {
      partial[rows * D + row] = top;
      partial[rows * (D + 1) + row] = total;
    }
  }
};

// Writes row n of a request and KV head.
template <class T, int D>
__device__ void write_row(const TreeAttentionParams& p, const DevicePlan& plan, const Request& r, int head, int n,
                          RowSum<D> sum) {
  const int lane = threadIdx.x % kWarp;
  const QueryRow at = query_row(plan, head, n);
  sum.scale(sum.total == 0 ? 0 : p.v_scale / sum.total);
#pragma unroll
  for (int v = 0; v < RowSum<D>::kVectors; ++v)
    if (RowSum<D>::has_columns()) store_out<T>(p, r, at, 4 * lane + 128 * v, sum.x[v]);
  if (lane == 0) store_lse(p, r, at, sum.top, sum.total);
}

// Merges rows first, first + step, ... below `count` of a row tile, by one warp. It takes several rows and partial
// results at a time, so that their loads are in flight together.
template <class T, int D, int kRowsAtOnce, int kPartsAtOnce>
__device__ __forceinline__ void merge_rows(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                           int row_tile, int first, int step, int count) {
  const int first_row = s.first_row + row_tile * plan.tile_rows;
#pragma unroll 1
  for (int row = first; row < count; row += kRowsAtOnce * step) {
    RowSum<D> sums[kRowsAtOnce];
#pragma unroll 1
    for (int j = 0; j < s.splits; j += kPartsAtOnce) {
      RowSum<D> some[kPartsAtOnce][kRowsAtOnce];
#pragma unroll
      for (int k = 0; k < kPartsAtOnce; ++k) {
        const int at = p.fixed_split || j + k == 0 ? s.first_partial + j + k : s.first_partial + 2 * (j + k) - 1;
        const float* partial = partial_of(p, plan, at, row_tile, D);
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i)
          if (j + k < s.splits && row + i * step < count) some[k][i].load(partial, plan.tile_rows, row + i * step);
      }
#pragma unroll
      for (int k = 0; k < kPartsAtOnce; ++k)
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) sums[i].add(some[k][i]);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i)
      if (row + i * step < count) write_row<T>(p, plan, s.request, s.kv_head, first_row + row + i * step, sums[i]);
  }
}

// Counts a worker in after it has stored its last partial result of an item. By each of its kThreads consumers, which
// meet in sync().
template <int D, class Sync>
__device__ __forceinline__ void publish_partial(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                                int row_tile, Sync&& sync) {
  sync();
  if (s.workers > 1 && threadIdx.x == 0) PartialsCounter(p, plan, s, row_tile, D).arrive();
}

// Merges this worker's rows of an item, by the same threads.
template <class T, int D, int kThreads, class Sync>
__device__ __forceinline__ void merge_item(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                           int row_tile, Sync&& sync) {
  constexpr int kLoads = 16 / RowSum<D>::kVectors;
  PartialsCounter counter(p, plan, s, row_tile, D);
  const bool counts = s.workers > 1 && threadIdx.x == 0;
  if (counts) counter.wait();
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
  if (counts) counter.depart();
}

// Writes zeros in the rows behind the last packed request, dealt out among all blocks of the call.
template <class T, int D, int kWarps>
__device__ void write_rows_behind(const TreeAttentionParams& p, const DevicePlan& plan) {
  const Request r = request_of(p, p.batch);
  const int count = r.rows * plan.gqa_group.divisor;
  const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  for (int64_t n = int64_t{block} * kWarps + threadIdx.x / kWarp; n < count * p.kv_heads; n += int64_t{blocks} * kWarps)
    write_row<T>(p, plan, r, static_cast<int>(n / count), static_cast<int>(n % count), RowSum<D>());
}

// Writes what no segment has, dealt out among all blocks of the call: the status of requests, and their rows that see
// nothing.
template <class T, int D, int kThreads>
__device__ void write_unseen_rows(const TreeAttentionParams& p, const DevicePlan& plan) {
  constexpr int kWarps = kThreads / kWarp;
  const int batch = static_cast<int>(p.batch), tile = plan.tile_rows * plan.row_tiles;
  const int slices = batch > 0 ? max(static_cast<int>(gridDim.x) / batch, 1) : 0;
  for (int64_t item = blockIdx.x; item < int64_t{batch} * slices; item += gridDim.x) {
    const Request r = request_of(p, item / slices);
    const int slice = static_cast<int>(item % slices), warp = threadIdx.x / kWarp;
    if (slice == 0 && threadIdx.x == 0 && r.status != 0) set_status(p.status, r.slot, r.status);
    const int valid = r.valid_rows * plan.gqa_group.divisor, end = r.rows * plan.gqa_group.divisor;
    for (int first = 0; first < end; first = first < valid ? min(first + tile, valid) : end) {
      if (first < valid && units_in(p, plan, tiles_of(p, plan, r, first), true) > 0) continue;
      const int count = (first < valid ? min(first + tile, valid) : end) - first;
      for (int n = slice * kWarps + warp; n < count * p.kv_heads; n += slices * kWarps)
        write_row<T>(p, plan, r, n / count, first + n % count, RowSum<D>());
    }
  }
  if (p.cu_seqlens_q != nullptr) write_rows_behind<T, D, kWarps>(p, plan);
}

}  // namespace specdec::attention
