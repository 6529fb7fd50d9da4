// RoPE, optional q/k RMSNorm and KV cache write, fused.
//
// A few lanes per head: each holds eight adjacent elements of the first half and the eight they are rotated with.
// blockIdx.x is the row; blockIdx.y and the block's lane groups are its heads. Reads and writes each head once; cos_sin
// and norm weights come from caches. With few rows latency dominates: one memory round trip, then one for the page
// table. So all independent reads are issued first.
#include <cutlass/fast_math.h>

#include "core/cuda.cuh"
#include "core/pack.cuh"
#include "layers/rope/rope_qkv_write_kv.h"

namespace specdec::layers {
namespace {

constexpr int kWarps = 4;     // per block
constexpr int kElements = 8;  // per lane, in each half of a head

template <int D>
constexpr int kLanes = D / 2 / kElements;  // per head
template <int D>
constexpr int kHeads = kWarps * kWarp / kLanes<D>;  // per block

// Read N adjacent elements as packs of U.
template <int N, int U, class T>
__device__ __forceinline__ void read(const T* from, float (&to)[N]) {
#pragma unroll
  for (int n = 0; n < N; n += U) {
    float part[U];
    unpack(*reinterpret_cast<const Pack<T, U>*>(from + n), part);
#pragma unroll
    for (int u = 0; u < U; ++u) to[n + u] = part[u];
  }
}
template <int N, int U, class T>
__device__ __forceinline__ void write(const float (&from)[N], T* to) {
#pragma unroll
  for (int n = 0; n < N; n += U) {
    float part[U];
#pragma unroll
    for (int u = 0; u < U; ++u) part[u] = from[n + u];
    *reinterpret_cast<Pack<T, U>*>(to + n) = pack_of<T>(part);
  }
}
template <int N>
__device__ __forceinline__ void write_fp8(const float (&from)[N], Float8* to, float scale) {
#pragma unroll
  for (int n = 0; n < N; ++n) to[n] = kv::to_float8(from[n], scale);
}

// U: elements per memory access.
template <class T, int D, int U>
__global__ void __launch_bounds__(kWarps* kWarp)
    rope_qkv_write_kv_kernel(RopeQkvWriteKvParams p, cutlass::FastDivmod q_len, cutlass::FastDivmod page_size) {
  begin_kernel();
  const kv::WriteKvParams& w = p.write;
  constexpr int N = kElements, half = D / 2, kFloatsPerRead = U > 1 ? 4 : 1;
  const int row = blockIdx.x, head = blockIdx.y * kHeads<D> + threadIdx.x / kLanes<D>, lane = threadIdx.x % kLanes<D>;
  const int query_heads = static_cast<int>(p.query_heads), heads = static_cast<int>(w.heads);
  if (head >= query_heads + 2 * heads) return;
  int b, j;
  if (w.cu_seqlens_q) {
    const RequestRow at = packed_request_row(p, row);
    b = static_cast<int>(at.b), j = static_cast<int>(at.j);
  } else {
    q_len(b, j, row);
  }
  const bool is_query = head < query_heads, is_value = head >= query_heads + heads;
  // Query, key and value heads are consecutive.
  const int in_request = w.cu_seqlens_q ? row : j;
  const T* from = reinterpret_cast<const T*>(row_data(p.q, b, in_request) + head * p.q.head_stride) + lane * N;
  float x[N], y[N];
  read<N, U>(from, x);
  read<N, U>(from + half, y);
  float cosine[N], sine[N];
  if (!is_value) {
    const float* const cos_sin_row = cos_sin_of(p, p.positions[row]) + lane * N;
    read<N, kFloatsPerRead>(cos_sin_row, cosine);
    read<N, kFloatsPerRead>(cos_sin_row + half, sine);
  }

  if (b < 0) {  // padding row: its queries are zeros, and nothing else is written
    if (!is_query) return;
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] = y[n] = 0;
    T* const out = reinterpret_cast<T*>(p.out_q + (static_cast<int64_t>(row) * query_heads + head) * w.head_bytes);
    write<N, U>(x, out + lane * N);
    write<N, U>(y, out + lane * N + half);
    return;
  }
  char* to;
  kv::RowsToWrite r;
  if (is_query) {
    to = p.out_q + (static_cast<int64_t>(row) * query_heads + head) * w.head_bytes;
  } else {
    r = rows_to_write(w, b);
    const bool first_head = head == query_heads && lane == 0;
    if (r.bits && j == 0 && first_head) set_status(w.status, r.slot, r.bits);
    if (j >= r.count) return;
    const kv::KvRow at = find_own_row(w.rows, page_size, r.slot, r.start + w.row_offset + j);
    if (at.bits) {
      if (first_head) set_status(w.status, r.slot, at.bits);
      return;
    }
    to = is_value ? row_data(w.v_pool, at) + (head - query_heads - heads) * w.v_pool.head_stride
                  : row_data(w.k_pool, at) + (head - query_heads) * w.k_pool.head_stride;
  }

  if (!is_value) {
    if (const T* const norm = static_cast<const T*>(is_query ? p.q_norm : p.k_norm)) {
      float squares = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) squares += x[n] * x[n] + y[n] * y[n];
      // Lanes of other heads in the warp may have exited.
      const unsigned lanes = ((1u << kLanes<D>)-1) << (threadIdx.x % kWarp - lane);
#pragma unroll
      for (int step = kLanes<D> / 2; step > 0; step /= 2) squares += __shfl_xor_sync(lanes, squares, step);
      const float scale = rsqrtf(squares / (2 * half) + p.eps);
      float low[N], high[N];
      read<N, U>(norm + lane * N, low);
      read<N, U>(norm + half + lane * N, high);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        x[n] *= scale * low[n];
        y[n] *= scale * high[n];
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float rotated_x = x[n] * cosine[n] - y[n] * sine[n];
      y[n] = y[n] * cosine[n] + x[n] * sine[n];
      x[n] = rotated_x;
    }
  }
  if (w.quantize && !is_query) {
    const float scale = is_value ? w.v_scale : w.k_scale;
    Float8* const out = reinterpret_cast<Float8*>(to) + lane * N;
    write_fp8(x, out, scale);
    write_fp8(y, out + half, scale);
  } else {
    T* const out = reinterpret_cast<T*>(to) + lane * N;
    write<N, U>(x, out);
    write<N, U>(y, out + half);
  }
}

}  // namespace

void rope_qkv_write_kv_cuda(const RopeQkvWriteKvParams& p, Stream stream) {
  const kv::WriteKvParams& w = p.write;
  const int64_t heads = p.query_heads + 2 * w.heads;
  const auto start = [&]<class T, int D, int U>() {
    const dim3 grid(grid_x("rope_qkv_write_kv", p.num_rows),
                    static_cast<unsigned>((heads + kHeads<D> - 1) / kHeads<D>));
    launch("rope_qkv_write_kv", rope_qkv_write_kv_kernel<T, D, U>, {.grid = grid, .threads = kWarps * kWarp}, stream, p,
           cutlass::FastDivmod(static_cast<int>(w.q_len)), cutlass::FastDivmod(static_cast<int>(w.rows.page_size)));
  };
  with_float_type(w.dtype, [&]<class T>() {
    const auto with_dim = [&]<int D>() {
      constexpr int kMaxPack = 16 / sizeof(T);
      w.unit == 16 ? start.template operator()<T, D, kMaxPack>() : start.template operator()<T, D, 1>();
    };
    if (p.head_dim == 64) return with_dim.template operator()<64>();
    if (p.head_dim == 128) return with_dim.template operator()<128>();
    with_dim.template operator()<256>();
  });
}

}  // namespace specdec::layers
