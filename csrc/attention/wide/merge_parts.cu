// The second launch for wide row tiles: rows whose KV several workers read have partial results to be merged, and rows
// that see nothing are still to be written. Each worker has left the first segment of the group that begins in its
// share and is cut, if there is one, so that nobody walks the work line again. Grid: about as many blocks as run at
// once, among which the rows of all these groups are dealt out, and some for the requests. Bytes: the partial results
// once, from the L2.
#include "attention/launch.h"
#include "attention/warp_rows.cuh"
#include "attention/wide/work_line.cuh"

namespace specdec::wide {
namespace {

constexpr int kWarps = 8;
constexpr int kBlocks = 512;
constexpr int kSlices = 8;  // blocks that share the rows of kWarps requests

// What some parts of a row sum to, brought to their highest maximum. Lane l has columns 4 l to 4 l + 3 of every 128,
// where there are that many.
template <int D>
struct Sum {
  static constexpr int kVectors = (D + 127) / 128;
  float top = -INFINITY, total = 0;
  float4 x[kVectors]{};

  __device__ static bool has_columns() { return D % 128 == 0 || threadIdx.x % kWarp * 4 < D; }

  __device__ void scale(float factor) {
#pragma unroll
    for (auto& v : x) v.x *= factor, v.y *= factor, v.z *= factor, v.w *= factor;
  }
  __device__ void add(const Sum& other) {
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
};

// Where part j of a group's row is, by its first segment.
__device__ __forceinline__ int part_at(const Segment& s, int j) { return s.part + 2 * j - (j > 0); }

// The parts first, first + step, ... of a row, a few at a time whose loads are on their way together.
template <int D>
__device__ Sum<D> sum_parts(const TreeAttentionParams& p, const Cut& cut, const Segment& s, int row, int first,
                            int step) {
  constexpr int kTogether = 8 / Sum<D>::kVectors;
  const int lane = threadIdx.x % kWarp, parts = s.parts, lane_of_worker = row / cut.rows;
  row %= cut.rows;
  Sum<D> sum;
#pragma unroll 1
  for (; first < parts; first += kTogether * step) {
    Sum<D> some[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (first + k * step >= parts) break;
      const float* part = part_of(p, cut, int64_t{part_at(s, first + k * step)} * cut.lanes + lane_of_worker, D);
#pragma unroll
      for (int v = 0; v < Sum<D>::kVectors; ++v)
        if (Sum<D>::has_columns()) some[k].x[v] = *reinterpret_cast<const float4*>(part + row * D + 4 * lane + 128 * v);
      some[k].top = part[cut.rows * D + row];
      some[k].total = part[cut.rows * (D + 1) + row];
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) sum.add(some[k]);
  }
  return sum;
}

template <class T, int D>
__device__ void write_row(const TreeAttentionParams& p, const Cut& cut, const Request& r, int head, int n, Sum<D> sum) {
  const int lane = threadIdx.x % kWarp;
  const QueryRow at = query_row(cut, head, n);
  sum.scale(sum.total == 0 ? 0 : p.v_scale / sum.total);
#pragma unroll
  for (int v = 0; v < Sum<D>::kVectors; ++v)
    if (Sum<D>::has_columns()) store_out<T>(p, r, at, 4 * lane + 128 * v, sum.x[v]);
  if (lane == 0) store_lse(p, r, at, sum.top, sum.total);
}

__device__ __forceinline__ bool has_row(const Cut& cut, const Segment& s, int row) {
  return s.first_row + row < s.request.valid_rows * cut.group.divisor;
}

// Which workers have left a group that is cut, for a whole block.
struct CutGroups {
  unsigned found[kMaxWorkers / kWarp];  // bit j of word i: worker 32 i + j

  __device__ void find(const TreeAttentionParams& p, const Cut& cut) {
#pragma unroll 2
    for (int base = threadIdx.x / kWarp * kWarp; base < kMaxWorkers; base += kWarps * kWarp) {
      const int worker = base + threadIdx.x % kWarp;
      const unsigned word = __ballot_sync(kFullMask, worker < cut.max_workers && cut_groups(p)[worker].parts > 0);
      if (worker == base) found[base / kWarp] = word;
    }
    __syncthreads();
  }
  __device__ int count() const {
    int n = 0;
    for (unsigned word : found) n += __popc(word);
    return n;
  }
  __device__ int worker(int n) const {
    int i = 0;
    for (; n >= __popc(found[i]); ++i) n -= __popc(found[i]);
    unsigned word = found[i];
    for (; n > 0; --n) word &= word - 1;
    return kWarp * i + __ffs(word) - 1;
  }
};

// This block's rows of the groups that are cut, a warp a row, or where there are few all warps.
template <class T, int D>
__device__ void merge_groups(const TreeAttentionParams& p, const Cut& cut) {
  __shared__ CutGroups groups;
  __shared__ Sum<D> shares[kWarps][kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Segment* cuts = cut_groups(p);
  groups.find(p, cut);
  const int each = cut.rows * cut.lanes, rows = groups.count() * each;
  if (rows > 2 * kBlocks) {
    for (int n = blockIdx.x * kWarps + warp; n < rows; n += kBlocks * kWarps) {
      const Segment& s = cuts[groups.worker(n / each)];
      const int row = n % each;
      if (has_row(cut, s, row))
        write_row<T>(p, cut, s.request, s.head, s.first_row + row, sum_parts<D>(p, cut, s, row, 0, 1));
    }
    return;
  }
  for (int n = blockIdx.x; n < rows; n += kBlocks) {
    const Segment& s = cuts[groups.worker(n / each)];
    const int row = n % each;
    if (!has_row(cut, s, row)) continue;
    Sum<D> sum = sum_parts<D>(p, cut, s, row, warp, kWarps);
    shares[warp][lane] = sum;
    __syncthreads();
    for (int w = 1; w < kWarps && warp == 0; ++w) sum.add(shares[w][lane]);
    __syncthreads();
    if (warp == 0) write_row<T>(p, cut, s.request, s.head, s.first_row + row, sum);
  }
}

// The rows of a request that see nothing, this warp's.
template <class T, int D>
__device__ void write_zeros(const TreeAttentionParams& p, const Cut& cut, const Request& r, int slice, int slices) {
  const int valid = r.valid_rows * cut.group.divisor, end = r.rows * cut.group.divisor, step = cut.rows * cut.lanes;
  for (int first = 0; first < end; first = first < valid ? min(first + step, valid) : end) {
    if (first < valid && units_in(p, cut, tiles_of(p, cut, r, first)) > 0) continue;
    const int count = (first < valid ? min(first + step, valid) : end) - first;
    for (int n = slice; n < count * p.kv_heads; n += slices)
      write_row<T>(p, cut, r, n / count, first + n % count, Sum<D>());
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kWarps* kWarp, 3)
    merge_parts_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Cut cut) {
  let_next_kernel_start();
  wait_for_kernels_before();
  if (blockIdx.x < kBlocks) return merge_groups<T, D>(p, cut);
  const int n = blockIdx.x - kBlocks, b = n / kSlices * kWarps + threadIdx.x / kWarp;
  if (b >= p.batch + (p.cu_seqlens_q != nullptr)) return;
  const Request r = request_of(p, b);
  if (n % kSlices == 0 && threadIdx.x % kWarp == 0 && r.status != 0) set_status(p.status, r.slot, r.status);
  write_zeros<T, D>(p, cut, r, n % kSlices, kSlices);
}

template <class T, int D>
void start(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  // Packed: the rows behind the last request are one more.
  const int64_t requests = p.batch + (p.cu_seqlens_q != nullptr);
  const LaunchShape shape{.grid = grid_x("tree_attention", kBlocks + (requests + kWarps - 1) / kWarps * kSlices),
                          .threads = kWarps * kWarp};
  launch("tree_attention", merge_parts_kernel<T, D>, shape, stream, p, cut);
}

}  // namespace

void merge_parts(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  with_16_bit_type(p.dtype,
                   [&]<class T>() { with_head_dim(p.head_dim, [&]<int D>() { start<T, D>(p, cut, stream); }); });
}

}  // namespace specdec::wide
