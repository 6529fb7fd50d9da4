// The second launch of tree_attention: rows whose KV several workers read have partial results to be merged, and rows
// that see nothing are still to be written. Grid: (blocks of rows of all requests, kv_heads), a row to a warp or to
// a block; a block whose rows one worker did alone has nothing to do. Bytes: the partial results once, from the L2.
#include "attention/launch.h"
#include "attention/query_rows.cuh"
#include "attention/warp_rows.cuh"

namespace specdec {
namespace {

constexpr int kWarps = 4;
constexpr int kManyParts = 8;  // more than this: the warps of a block share the parts of one row, else each has a row

// What some parts of a row sum to, brought to their highest maximum. Lane l has columns 4 l to 4 l + 3 of every 128, where
// there are that many.
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

// The parts first, first + step, ... of a row, a few at a time whose loads are on their way together.
template <int D>
__device__ Sum<D> sum_parts(const TreeAttentionParams& p, const Cut& cut, const WorkLine::Parts& parts, int row,
                            int lane_of_worker, int first, int step) {
  constexpr int kTogether = 8 / Sum<D>::kVectors;
  const int lane = threadIdx.x % kWarp;
  Sum<D> sum;
#pragma unroll 1
  for (; first < parts.count; first += kTogether * step) {
    Sum<D> some[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (first + k * step >= parts.count) break;
      const float* part = part_of(p, cut, int64_t{parts[first + k * step]} * cut.lanes + lane_of_worker, D);
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
__global__ void __launch_bounds__(kWarps* kWarp)
    merge_parts_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Cut cut,
                       int rows_per_block) {
  __shared__ Sum<D> shares[kWarps][kWarp];
  let_next_kernel_start();
  const auto [b, first] = find_row_block(p, rows_per_block, blockIdx.x);
  if (b < 0) return;
  const Request r = request_of(p, b);
  const int head = blockIdx.y, G = cut.group.divisor, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (first == 0 && head == 0 && threadIdx.x == 0 && r.status != 0) set_status(p.status, r.slot, r.status);

  // The block's rows are of one row tile.
  const int tile = static_cast<int>(first) / cut.rows, end = min(static_cast<int>(first) + rows_per_block, r.rows * G);
  WorkLine::Parts parts{};
  if (first < r.valid_rows * G) {
    WorkLine line(p, cut);
    line.measure();
    parts = line.parts_of(static_cast<int>(b), r, head, tile / cut.lanes * cut.lanes * cut.rows);
  }
  wait_for_kernels_before();
  const int sharing = parts.count > kManyParts ? kWarps : 1;  // warps of a row
  for (int base = static_cast<int>(first); base < end; base += kWarps / sharing) {
    const int n = base + warp / sharing;
    const bool valid = n < r.valid_rows * G;
    if (n >= end || (valid && parts.count == 1)) continue;
    Sum<D> sum;
    if (valid) sum = sum_parts<D>(p, cut, parts, n % cut.rows, tile % cut.lanes, warp % sharing, sharing);
    if (sharing > 1) {
      shares[warp][lane] = sum;
      __syncthreads();
      for (int w = 1; w < kWarps && warp == 0; ++w) sum.add(shares[w][lane]);
      __syncthreads();
      if (warp != 0) continue;
    }
    const QueryRow at = query_row(cut, head, n);
    sum.scale(sum.total == 0 ? 0 : p.v_scale / sum.total);
#pragma unroll
    for (int v = 0; v < Sum<D>::kVectors; ++v)
      if (Sum<D>::has_columns()) store_out<T>(p, r, at, 4 * lane + 128 * v, sum.x[v]);
    if (lane == 0) store_lse(p, r, at, sum.top, sum.total);
  }
}

template <class T, int D>
void start(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  // As many blocks as keep the device busy where there is much to merge: few requests have many parts.
  int rows = cut.rows;
  while (rows > 1 && count_row_blocks(p, rows) * p.kv_heads < cut.max_workers * cut.lanes) rows /= 2;
  const LaunchShape shape{
      .grid = dim3(grid_x("tree_attention", count_row_blocks(p, rows)), static_cast<unsigned>(p.kv_heads)),
      .threads = kWarps * kWarp};
  launch("tree_attention", merge_parts_kernel<T, D>, shape, stream, p, cut, rows);
}

}  // namespace

void merge_parts(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  const auto of_type = [&]<class T>() {
    switch (p.head_dim) {
      case 64:
        return start<T, 64>(p, cut, stream);
      case 128:
        return start<T, 128>(p, cut, stream);
      default:
        return start<T, 256>(p, cut, stream);
    }
  };
  p.dtype == kBFloat16 ? of_type.template operator()<BFloat16>() : of_type.template operator()<Half>();
}

}  // namespace specdec
