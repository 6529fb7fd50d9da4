// The second launch of tree_attention: rows whose KV several workers read have partial results to be merged, and rows
// that see nothing are still to be written. Grid: (blocks of rows of all requests, kv_heads), a warp a row; a block whose
// rows one worker did alone has nothing to do. Bytes: the partial results once, from the L2.
#include "attention/launch.h"
#include "attention/query_rows.cuh"
#include "attention/warp_rows.cuh"

namespace specdec {
namespace {

constexpr int kWarps = 4;

// One row: the sum over its parts, each brought to the highest maximum. Lane l has columns 4 l to 4 l + 3 of every 128,
// where there are that many.
template <class T, int D>
__device__ void merge_row(const TreeAttentionParams& p, const Cut& cut, const Request& r, QueryRow at, int row,
                          int lane_of_worker, const WorkLine::Parts& parts) {
  constexpr int kVectors = (D + 127) / 128;
  const int lane = threadIdx.x % kWarp;
  const auto part = [&](int j) { return part_of(p, cut, int64_t{parts[j]} * cut.lanes + lane_of_worker, D); };
  float top = -INFINITY, total = 0;
  for (int j = lane; j < parts.count; j += kWarp) top = fmaxf(top, part(j)[cut.rows * D + row]);
  for (int step = kWarp / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kFullMask, top, step));

  float4 sum[kVectors]{};
  for (int first = 0; first < parts.count; first += kWarp) {
    const int j = first + lane;
    float weight = 0;
    if (j < parts.count && top != -INFINITY) {
      const float* o = part(j);
      weight = exp2_fast(o[cut.rows * D + row] - top);
      total += weight * o[cut.rows * (D + 1) + row];
    }
    const int count = min(kWarp, parts.count - first);
#pragma unroll 8
    for (int k = 0; k < count; ++k) {
      const float w = __shfl_sync(kFullMask, weight, k);
      const float* o = part(first + k) + row * D;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (4 * lane + 128 * v >= D) continue;
        const float4 x = *reinterpret_cast<const float4*>(o + 4 * lane + 128 * v);
        sum[v].x += w * x.x, sum[v].y += w * x.y, sum[v].z += w * x.z, sum[v].w += w * x.w;
      }
    }
  }
  for (int step = kWarp / 2; step > 0; step /= 2) total += __shfl_xor_sync(kFullMask, total, step);
  const float factor = total == 0 ? 0 : p.v_scale / total;
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (4 * lane + 128 * v < D)
      store_out<T>(p, r, at, 4 * lane + 128 * v,
                   make_float4(sum[v].x * factor, sum[v].y * factor, sum[v].z * factor, sum[v].w * factor));
  if (lane == 0) store_lse(p, r, at, top, total);
}

template <class T, int D>
__global__ void __launch_bounds__(kWarps* kWarp)
    merge_parts_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Cut cut,
                       int rows_per_block) {
  let_next_kernel_start();
  const auto [b, first] = find_row_block(p, rows_per_block, blockIdx.x);
  if (b < 0) return;
  const Work work = work_of(p, cut, static_cast<int>(b));
  const Request& r = work.request;
  const int head = blockIdx.y, G = cut.group.divisor, warp = threadIdx.x / kWarp;
  if (first == 0 && head == 0 && threadIdx.x == 0 && r.status != 0) set_status(p.status, r.slot, r.status);

  // The block's rows are of one row tile.
  const int tile = static_cast<int>(first) / cut.rows;
  WorkLine::Parts parts{};
  if (first < r.valid_rows * G) {
    WorkLine line(p, cut);
    parts = line.parts_of(static_cast<int>(b), work, head, tile / cut.lanes * cut.lanes * cut.rows);
  }
  wait_for_kernels_before();
  const int end = min(static_cast<int>(first) + rows_per_block, r.rows * G);
  for (int n = static_cast<int>(first) + warp; n < end; n += kWarps) {
    const bool valid = n < r.valid_rows * G;
    if (valid && parts.count == 1) continue;
    merge_row<T, D>(p, cut, r, query_row(cut, head, n), n % cut.rows, tile % cut.lanes, valid ? parts : WorkLine::Parts{});
  }
}

template <class T, int D>
void start(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  // As many blocks as keep the device busy where there is much to merge: few requests have many parts.
  int rows = cut.rows;
  while (rows > kWarps && count_row_blocks(p, rows) * p.kv_heads < 2 * cut.max_workers) rows /= 2;
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
