// Write new K and V rows to the paged KV cache, copied or quantized to FP8.
//
// One warp per row; blockIdx.x is the request, blockIdx.y strides over its rows. K and V move in units of up to 16
// bytes, or of four elements when quantizing. Each lane has eight units in flight, and reads the first ones before the
// row's destination is known. Reads 2 * heads * head_bytes per valid row and writes as much, or half or a quarter as
// FP8.
#include <cutlass/fast_math.h>

#include <algorithm>

#include "core/cuda.cuh"
#include "kv/pool_view.h"
#include "kv/write_kv.h"

namespace specdec::kv {
namespace {

constexpr int kWarps = 4;          // per block, one row each
constexpr int64_t kBlocks = 8192;  // approximate maximum grid size; blocks stride over more rows
constexpr int kUnits = 4;          // of K and of V that a lane holds

// Conversions of a unit: a copy, or quantization to FP8.
template <class Unit>
struct Copy {
  using From = Unit;
  using To = Unit;
  __device__ static To convert(From x, float) { return x; }
};
template <class T, int N>
struct Quantize {
  struct alignas(N * sizeof(T)) From {
    T x[N];
  };
  struct alignas(N) To {
    Float8 x[N];
  };
  __device__ static To convert(From from, float scale) {
    To to;
#pragma unroll
    for (int n = 0; n < N; ++n) to.x[n] = to_float8(from.x[n], scale);
    return to;
  }
};

// A lane's units of kUnits * kWarp consecutive units of a row.
template <class Unit>
struct RowUnits {
  Unit k[kUnits], v[kUnits];
};

// Call f(n, head, unit) for this lane's n-th unit from `first` on, if the row is that long.
template <class F>
__device__ __forceinline__ void for_units(int first, int units, const cutlass::FastDivmod& units_per_head, F&& f) {
#pragma unroll
  for (int n = 0; n < kUnits; ++n) {
    const int i = first + n * kWarp + static_cast<int>(threadIdx.x);
    if (i >= units) return;
    int head, unit;
    units_per_head(head, unit, i);
    f(n, head, unit);
  }
}

template <class Transfer>
__global__ void __launch_bounds__(kWarp* kWarps)
    write_kv_kernel(WriteKvParams p, cutlass::FastDivmod page_size, cutlass::FastDivmod units_per_head, int units) {
  using From = typename Transfer::From;
  using To = typename Transfer::To;
  begin_kernel();
  const int64_t b = blockIdx.x;
  const RowsToWrite r = rows_to_write(p, b);
  if (r.bits && blockIdx.y == 0 && threadIdx.x == 0 && threadIdx.y == 0) set_status(p.status, r.slot, r.bits);

  for (int64_t j = static_cast<int64_t>(blockIdx.y) * kWarps + threadIdx.y; j < r.count;
       j += static_cast<int64_t>(gridDim.y) * kWarps) {
    const char* const k = row_data(p.k, b, r.first + j);
    const char* const v = row_data(p.v, b, r.first + j);
    RowUnits<From> units_read;
    const auto read = [&](int first) {
      for_units(first, units, units_per_head, [&](int n, int head, int unit) {
        units_read.k[n] = reinterpret_cast<const From*>(k + head * p.k.head_stride)[unit];
        units_read.v[n] = reinterpret_cast<const From*>(v + head * p.v.head_stride)[unit];
      });
    };
    read(0);
    const KvRow to = find_own_row(p.rows, page_size, r.slot, r.start + p.row_offset + j);
    if (to.bits) {
      if (threadIdx.x == 0) set_status(p.status, r.slot, to.bits);
      continue;
    }
    char* const k_to = row_data(p.k_pool, to);
    char* const v_to = row_data(p.v_pool, to);
    for (int first = 0; first < units; first += kUnits * kWarp) {
      if (first > 0) read(first);
      for_units(first, units, units_per_head, [&](int n, int head, int unit) {
        reinterpret_cast<To*>(k_to + head * p.k_pool.head_stride)[unit] = Transfer::convert(units_read.k[n], p.k_scale);
        reinterpret_cast<To*>(v_to + head * p.v_pool.head_stride)[unit] = Transfer::convert(units_read.v[n], p.v_scale);
      });
    }
  }
}

}  // namespace

void write_kv_cuda(const WriteKvParams& p, Stream stream) {
  const int64_t units_per_head = p.head_bytes / p.unit;
  const int64_t row_blocks = (p.q_len + kWarps - 1) / kWarps;
  const int64_t blocks_y = std::max<int64_t>(1, std::min({row_blocks, kBlocks / p.batch, kMaxGridY}));
  const dim3 grid(grid_x("write_kv", p.batch), static_cast<unsigned>(blocks_y));
  const auto start = [&]<class Transfer>() {
    launch("write_kv", write_kv_kernel<Transfer>, {.grid = grid, .threads = dim3(kWarp, kWarps)}, stream, p,
           cutlass::FastDivmod(static_cast<int>(p.rows.page_size)),
           cutlass::FastDivmod(static_cast<int>(units_per_head)), static_cast<int>(units_per_head * p.heads));
  };
  if (!p.quantize) return with_copy_unit(p.unit, [&]<class Unit>() { start.template operator()<Copy<Unit>>(); });
  with_float_type(p.dtype, [&]<class T>() {
    if (p.unit == sizeof(T))
      start.template operator()<Quantize<T, 1>>();
    else
      start.template operator()<Quantize<T, 4>>();
  });
}

}  // namespace specdec::kv
