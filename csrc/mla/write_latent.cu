// Latent rows: RMSNorm, RoPE and cache write, and the RMSNorm of what queries are made of.
//
// A block per row and part: blockIdx.y is 0 for the latent row, 1 for the queries' part. A thread keeps its elements in
// registers between the sum of squares and the write. Everything is read and written once; a row of 576 elements is
// one kilobyte, so latency dominates: one memory round trip, then the page table.
#include <cutlass/fast_math.h>

#include "core/pack.cuh"
#include "core/packed_rows.h"
#include "core/warp.cuh"
#include "mla/write_latent.h"

namespace specdec::mla {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr int kMaxPerThread = kMaxNormWidth / kThreads;

__device__ float sum_of_block(float x) {
  __shared__ float warp_sums[kWarps];
  x = warp_sum(x);
  if (lane_id() == 0) warp_sums[warp_id()] = x;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += warp_sums[w];
  return sum;
}

// Normalize a row by packs of U elements, at most kPerThread of them a thread; emit(d, values) gets each pack.
template <class T, int U, int kPerThread, class Emit>
__device__ void normalize(const T* from, const T* norm, int width, float eps, Emit emit) {
  float values[kPerThread / U][U], squares = 0;
#pragma unroll
  for (int n = 0; n < kPerThread / U; ++n) {
    const int d = (n * kThreads + static_cast<int>(threadIdx.x)) * U;
#pragma unroll
    for (int u = 0; u < U; ++u) values[n][u] = 0;
    if (d < width) unpack(*reinterpret_cast<const Pack<T, U>*>(from + d), values[n]);
#pragma unroll
    for (int u = 0; u < U; ++u) squares += values[n][u] * values[n][u];
  }
  const float factor = rsqrtf(sum_of_block(squares) / static_cast<float>(width) + eps);
#pragma unroll
  for (int n = 0; n < kPerThread / U; ++n) {
    const int d = (n * kThreads + static_cast<int>(threadIdx.x)) * U;
    if (d >= width) break;
    float weights[U];
    unpack(*reinterpret_cast<const Pack<T, U>*>(norm + d), weights);
#pragma unroll
    for (int u = 0; u < U; ++u) values[n][u] *= factor * weights[u];
    emit(d, values[n]);
  }
}

template <class T>
__device__ void store(const WriteLatentParams& p, char* to, int64_t d, float value) {
  if (p.write.quantize)
    reinterpret_cast<Float8*>(to)[d] = kv::to_float8(value, p.write.k_scale);
  else
    reinterpret_cast<T*>(to)[d] = from_float<T>(value);
}

// U: elements per memory access; kPerThread: elements of a row that a thread holds.
template <class T, int U, int kPerThread>
__global__ void __launch_bounds__(kThreads)
    write_latent_kernel(WriteLatentParams p, cutlass::FastDivmod q_len, cutlass::FastDivmod page_size) {
  begin_kernel();
  const kv::WriteKvParams& w = p.write;
  const int row = blockIdx.x;
  int b, j;
  if (w.cu_seqlens_q) {
    b = static_cast<int>(request_of_row(w.cu_seqlens_q, w.batch, row));
    j = b < 0 ? 0 : row - w.cu_seqlens_q[b];
  } else {
    q_len(b, j, row);
  }
  const int in_request = w.cu_seqlens_q ? row : j;
  if (blockIdx.y == 1) {
    const T* const from = reinterpret_cast<const T*>(row_data(p.q, w.cu_seqlens_q ? 0 : b, in_request));
    T* const out = reinterpret_cast<T*>(p.q_out) + row * p.q_width;
    normalize<T, U, kPerThread>(
        from, static_cast<const T*>(p.q_norm), static_cast<int>(p.q_width), p.eps,
        [&](int d, const float (&values)[U]) { *reinterpret_cast<Pack<T, U>*>(out + d) = pack_of<T>(values); });
    return;
  }

  // The whole block takes the same branches.
  if (b < 0) return;
  const kv::RowsToWrite r = rows_to_write(w, b);
  if (r.bits && j == 0 && threadIdx.x == 0) set_status(w.status, r.slot, r.bits);
  if (j >= r.count) return;
  const kv::KvRow at = find_own_row(w.rows, page_size, r.slot, r.start + w.row_offset + j);
  if (at.bits) {
    if (threadIdx.x == 0) set_status(w.status, r.slot, at.bits);
    return;
  }
  const T* const from = reinterpret_cast<const T*>(row_data(w.k, b, in_request));
  char* const to = row_data(w.k_pool, at);
  const T* const rope = from + p.latent_dim;
  const int half = static_cast<int>(p.rope_dim / 2);
  if (p.cos_sin) {
    const float* const turn = cos_sin_of(p.cos_sin, p.positions, row, p.num_positions, p.rope_dim);
    for (int i = threadIdx.x; i < half; i += kThreads) {
      const RotatedPair pair = rotated_pair(i, half, p.interleaved);
      const float first = to_float(rope[pair.first]), second = to_float(rope[pair.second]);
      store<T>(p, to, p.latent_dim + i, first * turn[i] - second * turn[half + i]);
      store<T>(p, to, p.latent_dim + half + i, second * turn[i] + first * turn[half + i]);
    }
  } else {
    for (int d = threadIdx.x; d < p.rope_dim; d += kThreads) store<T>(p, to, p.latent_dim + d, to_float(rope[d]));
  }
  normalize<T, U, kPerThread>(from, static_cast<const T*>(p.norm), static_cast<int>(p.latent_dim), p.eps,
                              [&](int d, const float (&values)[U]) {
                                if (w.quantize) {
#pragma unroll
                                  for (int u = 0; u < U; ++u) store<T>(p, to, d + u, values[u]);
                                } else {
                                  *reinterpret_cast<Pack<T, U>*>(to + d * sizeof(T)) = pack_of<T>(values);
                                }
                              });
}

}  // namespace

void write_latent_cuda(const WriteLatentParams& p, Stream stream) {
  const kv::WriteKvParams& w = p.write;
  const int64_t width = std::max(p.latent_dim, p.q_width);
  const auto start = [&]<class T, int U, int kPerThread>() {
    const dim3 grid(grid_x("write_latent", p.num_rows), p.q.data ? 2 : 1);
    launch("write_latent", write_latent_kernel<T, U, kPerThread>, {.grid = grid, .threads = kThreads}, stream, p,
           cutlass::FastDivmod(static_cast<int>(w.q_len)), cutlass::FastDivmod(static_cast<int>(w.rows.page_size)));
  };
  with_float_type(w.dtype, [&]<class T>() {
    constexpr int kPack = 16 / sizeof(T);
    if (w.unit < 16) return start.template operator()<T, 1, kMaxPerThread>();
    if (width <= 2 * kPack * kThreads) return start.template operator()<T, kPack, 2 * kPack>();
    start.template operator()<T, kPack, kMaxPerThread>();
  });
}

}  // namespace specdec::mla
