// Latent rows: RMSNorm, RoPE and cache write, and the RMSNorm of what queries are made of.
//
// A block per row and part: blockIdx.y is 0 for the latent row, 1 for the queries' part. A thread keeps its elements in
// registers between the sum of squares and the write. Everything is read and written once; a row of 576 elements is
// one kilobyte, so latency dominates. Where a row is written takes four reads that depend on each other (lengths and
// slot, prefix, page table, owners of the page), one more to find a request among several. Elements, position, cosines
// and sines arrive meanwhile; no kernel writes the norm weights, so they are read while earlier kernels still run.
#include <cutlass/fast_math.h>

#include <bit>
#include <type_traits>

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

// A thread's elements of a row in packs of U, at most kPerThread; zeros after the row's end. Packs are kept as they
// were loaded, so that nothing waits for them before they are used.
template <class T, int U, int kPerThread>
class RowPacks {
 public:
  static constexpr int kPacks = kPerThread / U;

  __device__ RowPacks(const T* row, int width) {
#pragma unroll
    for (int n = 0; n < kPacks; ++n)
      loaded_[n] = begin(n) < width ? *reinterpret_cast<const Loaded*>(row + begin(n)) : Loaded{};
  }
  // Return the first element of pack n.
  __device__ static int begin(int n) { return (n * kThreads + static_cast<int>(threadIdx.x)) * U; }
  __device__ void read(int n, float (&values)[U]) const { unpack(std::bit_cast<Pack<T, U>>(loaded_[n]), values); }

 private:
  using Loaded = std::conditional_t<sizeof(Pack<T, U>) == sizeof(uint4), uint4, Pack<T, U>>;
  Loaded loaded_[kPacks];
};

// Normalize a row; emit(d, values) gets each pack.
template <class T, int U, int kPerThread, class Emit>
__device__ void normalize(const RowPacks<T, U, kPerThread>& row, const RowPacks<T, U, kPerThread>& norm, int width,
                          float eps, Emit emit) {
  float squares = 0;
#pragma unroll
  for (int n = 0; n < row.kPacks; ++n) {
    float values[U];
    row.read(n, values);
#pragma unroll
    for (int u = 0; u < U; ++u) squares += values[u] * values[u];
  }
  const float factor = rsqrtf(sum_of_block(squares) / static_cast<float>(width) + eps);
#pragma unroll
  for (int n = 0; n < row.kPacks; ++n) {
    if (row.begin(n) >= width) break;
    float values[U], weights[U];
    row.read(n, values);
    norm.read(n, weights);
#pragma unroll
    for (int u = 0; u < U; ++u) values[u] *= factor * weights[u];
    emit(row.begin(n), values);
  }
}

template <class T>
__device__ void store(const WriteLatentParams& p, char* to, int64_t d, float value) {
  if (p.write.quantize)
    reinterpret_cast<Float8*>(to)[d] = kv::to_float8(value, p.write.k_scale);
  else
    reinterpret_cast<T*>(to)[d] = from_float<T>(value);
}

// A pair of the rotated part, and the cosine and sine of its angle.
template <class T>
struct Rotation {
  T first, second;
  float cosine, sine;
};

// U: elements per memory access; kPerThread: elements of a row that a thread holds.
template <class T, int U, int kPerThread>
__global__ void __launch_bounds__(kThreads)
    write_latent_kernel(WriteLatentParams p, cutlass::FastDivmod q_len, cutlass::FastDivmod page_size) {
  using Packs = RowPacks<T, U, kPerThread>;
  const kv::WriteKvParams& w = p.write;
  const int row = blockIdx.x;
  const bool packed = w.cu_seqlens_q, is_query = blockIdx.y == 1;
  const int width = static_cast<int>(is_query ? p.q_width : p.latent_dim);
  let_next_kernel_start();
  const Packs norm(static_cast<const T*>(is_query ? p.q_norm : p.norm), width);
  wait_for_kernels_before();

  int b = 0, j = row;
  if (!packed) q_len(b, j, row);
  const T* const from = reinterpret_cast<const T*>(row_data(is_query ? p.q : w.k, b, j));
  const Packs elements(from, width);
  if (is_query) {
    T* const out = reinterpret_cast<T*>(p.q_out) + row * p.q_width;
    normalize(elements, norm, width, p.eps,
              [&](int d, const float (&values)[U]) { *reinterpret_cast<Pack<T, U>*>(out + d) = pack_of<T>(values); });
    return;
  }

  const int32_t position = p.positions ? p.positions[row] : 0;

  // The whole block takes the same branches.
  if (packed && w.batch != 1) b = static_cast<int>(request_of_row(w.cu_seqlens_q, w.batch, row));
  if (b < 0) return;
  const kv::RowsToWrite r = rows_to_write(w, b);
  const int64_t in_request = packed ? row - r.first : j;
  if (r.first < 0 || in_request < 0 || in_request >= r.present) return;  // no row of the only request
  const int thread = threadIdx.x, half = static_cast<int>(p.rope_dim / 2);
  if (r.bits && in_request == 0 && thread == 0) set_status(w.status, r.slot, r.bits);
  if (in_request >= r.count) return;

  const T* const rope = from + p.latent_dim;
  const float* const turn = cos_sin_of(p.cos_sin, position, p.num_positions, p.rope_dim);
  const auto read_rotation = [&](int i) {
    const RotatedPair pair = rotated_pair(i, half, p.interleaved);
    return Rotation<T>{rope[pair.first], rope[pair.second], turn[i], turn[half + i]};
  };
  Rotation<T> rotation{};
  if (p.cos_sin && thread < half) rotation = read_rotation(thread);
  const kv::KvRow at = find_own_row(w.rows, page_size, r.slot, r.start + w.row_offset + in_request);
  if (at.bits) {
    if (thread == 0) set_status(w.status, r.slot, at.bits);
    return;
  }
  char* const to = row_data(w.k_pool, at);
  if (p.cos_sin) {
    for (int i = thread; i < half; i += kThreads) {
      if (i > thread) rotation = read_rotation(i);
      const float first = to_float(rotation.first), second = to_float(rotation.second);
      store<T>(p, to, p.latent_dim + i, first * rotation.cosine - second * rotation.sine);
      store<T>(p, to, p.latent_dim + half + i, second * rotation.cosine + first * rotation.sine);
    }
  } else {
    for (int d = thread; d < p.rope_dim; d += kThreads) store<T>(p, to, p.latent_dim + d, to_float(rope[d]));
  }
  normalize(elements, norm, width, p.eps, [&](int d, const float (&values)[U]) {
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
