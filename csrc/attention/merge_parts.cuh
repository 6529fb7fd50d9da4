// Rows whose KV several workers read. Each leaves its partial results in the workspace and counts itself in; when a
// worker has done all of its share, it waits for the others of its first and last group and merges a share of their
// rows. Parts are merged in the order of the KV, so that equal calls give equal bits. Waiting is safe since all blocks
// of a call run at once (it is launched so), and since each has left all it has before it waits. Bytes: the partial
// results once each way, through the L2.
#pragma once

#include <cuda/atomic>

#include "attention/warp_rows.cuh"

namespace specdec {

// Partial results in the workspace: for each part and row tile the sums [rows, D], the maxima [rows] and sums of
// weights [rows] they belong to, and in a group's first part the counter of those that have left theirs, or where
// clusters share it a counter for each row.
constexpr int kCounterFloats = 4;
__host__ __device__ inline int64_t part_floats(const Cut& cut, int64_t D) {
  return int64_t{cut.rows} * (D + 2) + (cut.cluster ? 2 * cut.rows : kCounterFloats);
}
__device__ __forceinline__ float* part_of(const TreeAttentionParams& p, const Cut& cut, int64_t part,
                                          int lane_of_worker, int D) {
  return p.workspace + (part * cut.lanes + lane_of_worker) * part_floats(cut, D);
}

// Counts the workers that have left their parts of a group, and then those that know it. Whatever lies there that is no
// counter was written by somebody else since: the workspace needs no zeros. Its upper half is a float that no
// arithmetic gives, a signalling NaN.
class PartsCounter {
 public:
  __device__ PartsCounter(const TreeAttentionParams& p, const Cut& cut, const Segment& s, int lane_of_worker, int D,
                          int row = 0)
      : at_(reinterpret_cast<uint64_t*>(part_of(p, cut, s.first_part, lane_of_worker, D) +
                                        int64_t{cut.rows} * (D + 2)) +
            row),
        workers_(s.workers) {}

  // What the block did before is seen by whoever waits for it, or comes after it. By one thread, after the block's
  // others. Returns how many have arrived.
  __device__ unsigned arrive() {
    uint64_t seen = count().fetch_add(1, cuda::std::memory_order_acq_rel);
    if (counts(seen)) return static_cast<unsigned>(seen) + 1;
    ++seen;
    uint64_t next;
    do next = counts(seen) ? seen + 1 : kNobody + 1;
    while (!count().compare_exchange_strong(seen, next, cuda::std::memory_order_acq_rel));
    return static_cast<unsigned>(next);
  }
  // The same where nobody waits: whether all others have come before. The last one makes the counter ready for the next
  // call.
  __device__ bool arrive_last() {
    const bool last = arrive() == workers_;
    if (last) count().store(kNobody, cuda::std::memory_order_relaxed);
    return last;
  }
  __device__ void wait() {
    while (static_cast<unsigned>(*static_cast<volatile uint64_t*>(at_)) < workers_) __nanosleep(20);
    __threadfence();
  }
  // The last one to know it makes the counter ready for the next call.
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

// What some parts of a row sum to, brought to their highest maximum. Lane l has columns 4 l to 4 l + 3 of every 128,
// where there are that many.
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

  // Row `row` of a part, past the L1: other multiprocessors wrote it.
  __device__ void load(const float* part, int rows, int row) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (has_columns()) x[v] = __ldcg(reinterpret_cast<const float4*>(part + row * D + 4 * lane + 128 * v));
    top = __ldcg(part + rows * D + row);
    total = __ldcg(part + rows * (D + 1) + row);
  }
  __device__ void store(float* part, int rows, int row) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (has_columns()) *reinterpret_cast<float4*>(part + row * D + 4 * lane + 128 * v) = x[v];
    if (lane == 0) {
      part[rows * D + row] = top;
      part[rows * (D + 1) + row] = total;
    }
  }
};

// Writes row n of a request and KV head.
template <class T, int D>
__device__ void write_row(const TreeAttentionParams& p, const Cut& cut, const Request& r, int head, int n,
                          RowSum<D> sum) {
  const int lane = threadIdx.x % kWarp;
  const QueryRow at = query_row(cut, head, n);
  sum.scale(sum.total == 0 ? 0 : p.v_scale / sum.total);
#pragma unroll
  for (int v = 0; v < RowSum<D>::kVectors; ++v)
    if (RowSum<D>::has_columns()) store_out<T>(p, r, at, 4 * lane + 128 * v, sum.x[v]);
  if (lane == 0) store_lse(p, r, at, sum.top, sum.total);
}

// Rows first, first + step ... below `count` of a row tile, this warp's. Some rows and parts at a time, whose loads are
// on their way together.
template <class T, int D, int kRowsAtOnce, int kPartsAtOnce>
__device__ __forceinline__ void merge_rows(const TreeAttentionParams& p, const Cut& cut, const Segment& s,
                                           int lane_of_worker, int first, int step, int count) {
  const int first_row = s.first_row + lane_of_worker * cut.rows;
#pragma unroll 1
  for (int row = first; row < count; row += kRowsAtOnce * step) {
    RowSum<D> sums[kRowsAtOnce];
#pragma unroll 1
    for (int j = 0; j < s.parts; j += kPartsAtOnce) {
      RowSum<D> some[kPartsAtOnce][kRowsAtOnce];
#pragma unroll
      for (int k = 0; k < kPartsAtOnce; ++k) {
        const int at = p.fixed_split || j + k == 0 ? s.first_part + j + k : s.first_part + 2 * (j + k) - 1;
        const float* part = part_of(p, cut, at, lane_of_worker, D);
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i)
          if (j + k < s.parts && row + i * step < count) some[k][i].load(part, cut.rows, row + i * step);
      }
#pragma unroll
      for (int k = 0; k < kPartsAtOnce; ++k)
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) sums[i].add(some[k][i]);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i)
      if (row + i * step < count) write_row<T>(p, cut, s.request, s.head, first_row + row + i * step, sums[i]);
  }
}

// After a block has stored its part of a group, the last one it has: each of its kThreads consumers, which meet in
// sync().
template <int D, class Sync>
__device__ __forceinline__ void leave_part(const TreeAttentionParams& p, const Cut& cut, const Segment& s,
                                           int lane_of_worker, Sync&& sync) {
  sync();
  if (s.workers > 1 && threadIdx.x == 0) PartsCounter(p, cut, s, lane_of_worker, D).arrive();
}

// This worker's share of a group's rows, by the same threads.
template <class T, int D, int kThreads, class Sync>
__device__ __forceinline__ void merge_group(const TreeAttentionParams& p, const Cut& cut, const Segment& s,
                                            int lane_of_worker, Sync&& sync) {
  constexpr int kLoads = 16 / RowSum<D>::kVectors;
  PartsCounter counter(p, cut, s, lane_of_worker, D);
  const bool counts = s.workers > 1 && threadIdx.x == 0;
  if (counts) counter.wait();
  sync();
  const int count = min(cut.rows, s.request.valid_rows * cut.group.divisor - s.first_row - lane_of_worker * cut.rows);
  const int first = s.place + static_cast<int>(threadIdx.x) / kWarp * s.workers, step = kThreads / kWarp * s.workers;
  if (s.parts > 8)
    merge_rows<T, D, 1, kLoads>(p, cut, s, lane_of_worker, first, step, count);
  else if (s.parts > 4)
    merge_rows<T, D, kLoads / 8, 8>(p, cut, s, lane_of_worker, first, step, count);
  else
    merge_rows<T, D, kLoads / 4, 4>(p, cut, s, lane_of_worker, first, step, count);
  if (counts) counter.depart();
}

// What no segment has: the status of requests and their rows that see nothing, dealt out among all blocks of the call.
template <class T, int D, int kThreads>
__device__ void write_unseen_rows(const TreeAttentionParams& p, const Cut& cut) {
  constexpr int kWarps = kThreads / kWarp;
  // Packed: the rows behind the last request are one more.
  const int requests = static_cast<int>(p.batch) + (p.cu_seqlens_q != nullptr);
  const int slices = max(static_cast<int>(gridDim.x) / requests, 1), tile = cut.rows * cut.lanes;
  for (int64_t item = blockIdx.x; item < int64_t{requests} * slices; item += gridDim.x) {
    const Request r = request_of(p, item / slices);
    const int slice = static_cast<int>(item % slices), warp = threadIdx.x / kWarp;
    if (slice == 0 && threadIdx.x == 0 && r.status != 0) set_status(p.status, r.slot, r.status);
    const int valid = r.valid_rows * cut.group.divisor, end = r.rows * cut.group.divisor;
    for (int first = 0; first < end; first = first < valid ? min(first + tile, valid) : end) {
      if (first < valid && units_in(p, cut, tiles_of(p, cut, r, first), true) > 0) continue;
      const int count = (first < valid ? min(first + tile, valid) : end) - first;
      for (int n = slice * kWarps + warp; n < count * p.kv_heads; n += slices * kWarps)
        write_row<T>(p, cut, r, n / count, first + n % count, RowSum<D>());
    }
  }
}

}  // namespace specdec
