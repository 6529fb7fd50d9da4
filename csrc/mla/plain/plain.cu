// mla_tree_attention without tensor cores: for float32, and for rows that are not aligned to 16 bytes.
//
// A block computes 8 rows of one item (work_item.cuh). It streams the latent rows that these see in tiles of 32 through
// shared memory as float32, with an online softmax. A warp owns 2 rows; a lane owns one token of their scores, and
// every 32nd column of their outputs. Nothing crosses warps, and a row's arithmetic depends on nothing but its own
// request. Grid: one block per item. Traffic: the latent rows of a request once per 8 rows.
#include "core/cuda.cuh"
#include "mla/kernels.h"
#include "mla/work_item.cuh"

namespace specdec::mla {
namespace {

constexpr int kThreads = 128, kRows = 8, kTokens = 32;
constexpr int kRowsPerWarp = kRows / (kThreads / kWarp);
constexpr int kColumns = kMaxLatent / kWarp;  // of the output that a lane owns, at most

struct Shared {
  float q[kRows][kMaxWidth];  // scaled to log2 units
  float kv[kTokens][kMaxWidth + 1];
  float weights[kRows][kTokens];
  const char* rows[kTokens];  // null: not present
};

template <class T, class Row>
__global__ void __launch_bounds__(kThreads) plain_kernel(const __grid_constant__ MlaTreeAttentionParams p,
                                                         const __grid_constant__ cutlass::FastDivmod page_size) {
  begin_kernel();
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const WorkItem item = find_item(p, kRows, blockIdx.x);
  if (item.count == 0) return;
  const Request& r = item.request;
  const int heads = static_cast<int>(p.q_heads), width = static_cast<int>(p.width);
  const int latent = static_cast<int>(p.latent_dim);
  const int lane = threadIdx.x % kWarp, first_row = threadIdx.x / kWarp * kRowsPerWarp;

  for (int n = threadIdx.x; n < kRows * width; n += kThreads) {
    const int row = n / width, d = n % width, i = (item.begin + row) / heads, h = (item.begin + row) % heads;
    s.q[row][d] =
        row < item.valid
            ? to_float(static_cast<const T*>(p.q)[r.q_start + i * p.q_strides.row + h * p.q_strides.head + d]) *
                  p.log2_scale
            : 0.0f;
  }

  float acc[kRowsPerWarp][kColumns] = {}, max_score[kRowsPerWarp], sum[kRowsPerWarp] = {};
#pragma unroll
  for (int a = 0; a < kRowsPerWarp; ++a) max_score[a] = -INFINITY;

  // Tiles start at multiples of kTokens even with a window, so that no row depends on its neighbors.
  for (int first = item.kv_begin / kTokens * kTokens; first < item.kv_end; first += kTokens) {
    __syncthreads();  // the tile before has been used
    if (threadIdx.x < kTokens) s.rows[threadIdx.x] = find_latent_row(p, item, page_size, first + threadIdx.x);
    __syncthreads();
    for (int j = threadIdx.x / kWarp; j < kTokens; j += kThreads / kWarp) {
      const char* from = s.rows[j];
      for (int d = lane; d < width; d += kWarp) s.kv[j][d] = from == nullptr ? 0.0f : latent_element<Row>(from, d);
    }
    __syncthreads();
    if (first_row >= item.valid) continue;

    float score[kRowsPerWarp] = {};
    for (int d = 0; d < width; ++d) {
      const float k = s.kv[lane][d];
#pragma unroll
      for (int a = 0; a < kRowsPerWarp; ++a) score[a] = fmaf(s.q[first_row + a][d], k, score[a]);
    }
    const bool masked = needs_mask(p, item, first, kTokens);
#pragma unroll
    for (int a = 0; a < kRowsPerWarp; ++a) {
      bool sees = s.rows[lane] != nullptr && first_row + a < item.valid;
      if (sees && masked) sees = visible_to_row(p, item, first_row + a, first) >> lane & 1;
      if (!sees) score[a] = -INFINITY;
      float new_max = fmaxf(max_score[a], score[a]);
      for (int step = kWarp / 2; step > 0; step /= 2)
        new_max = fmaxf(new_max, __shfl_xor_sync(kFullMask, new_max, step));
      // Before any visible token: 2^(-inf - 0), not 2^(-inf + inf).
      const float origin = new_max > -INFINITY ? new_max : 0.0f;
      const float rescale = exp2f(max_score[a] - origin), weight = exp2f(score[a] - origin);
      max_score[a] = new_max;
      sum[a] = sum[a] * rescale + weight;
      s.weights[first_row + a][lane] = weight;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) acc[a][c] *= rescale;
    }
    __syncwarp();
    for (int j = 0; j < kTokens; ++j) {
#pragma unroll
      for (int a = 0; a < kRowsPerWarp; ++a) {
        const float weight = s.weights[first_row + a][j];
        if (weight == 0) continue;  // warp-uniform; what a row does not see must not be read, it may hold NaN
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          if (c * kWarp + lane < latent) acc[a][c] = fmaf(weight, s.kv[j][c * kWarp + lane], acc[a][c]);
      }
    }
  }

#pragma unroll
  for (int a = 0; a < kRowsPerWarp; ++a) {
    float total = sum[a];
    for (int step = kWarp / 2; step > 0; step /= 2) total += __shfl_xor_sync(kFullMask, total, step);
    if (first_row + a >= item.count) continue;  // warp-uniform
    const int i = (item.begin + first_row + a) / heads, h = (item.begin + first_row + a) % heads;
    T* out = static_cast<T*>(p.out) + r.out_start + i * p.out_strides.row + h * p.out_strides.head;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (c * kWarp + lane < latent)
        out[c * kWarp + lane] = from_float<T>(total == 0 ? 0.0f : acc[a][c] / total * p.v_scale);
    if (p.lse != nullptr && lane == 0)
      p.lse[(r.flat_row + i) * p.q_heads + h] =
          total == 0 ? -INFINITY : (max_score[a] + log2f(total)) * 0.6931471805599453f;
  }
}

}  // namespace

void plain_attention(const MlaTreeAttentionParams& p, Stream stream) {
  with_row_types(p, [&]<class T, class Row>() {
    const LaunchShape shape{.grid = dim3(grid_x("mla_tree_attention", count_items(p, kRows))),
                            .threads = kThreads,
                            .shared_bytes = sizeof(Shared)};
    SD_CUDA_CHECK("mla_tree_attention",
                  cudaFuncSetAttribute(plain_kernel<T, Row>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(sizeof(Shared))));
    launch("mla_tree_attention", plain_kernel<T, Row>, shape, stream, p,
           cutlass::FastDivmod(static_cast<int>(p.rows.page_size)));
  });
}

}  // namespace specdec::mla
