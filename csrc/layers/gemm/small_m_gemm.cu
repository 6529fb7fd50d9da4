// small-M GEMM with mma.sync, for GPUs before and after Hopper: y = x weight^T, eight rows of x at a time (grid.y).
//
// One block per SM. Each block owns a range of 16-row weight tiles; its warps split K and add their sums at the end.
// The weight is read once, x once per block and group of tiles, mostly from caches: the lower bound is weight bytes
// over bandwidth.
//
// m16n8k16, with weight rows as M and rows of x as N. The order of elements along K is free as long as both operands
// agree: a thread takes eight contiguous elements for two steps, so one 16-byte read serves both without a transpose.
// Each warp keeps its own cp.async ring of weight slices (128 bytes of each of 16 rows) and waits for no other warp.
//
// Programmatic dependent launch: a forward pass is a chain of GEMMs with small kernels between them, which would leave
// memory idle. This kernel starts while they still run and fills its rings before x is ready, since none of them writes
// the weight.
#include <algorithm>

#include "core/copy_async.cuh"
#include "core/mma.cuh"
#include "core/wgmma.cuh"
#include "layers/activation/silu_and_mul.h"
#include "layers/gemm/small_m_gemm.h"

namespace specdec::layers {
namespace {

constexpr int kRows = 8;    // of x, per step
constexpr int kTile = 16;   // rows of the weight, per step
constexpr int kSlice = 64;  // elements of a row that a warp reads at a time: four steps
constexpr int kSliceBytes = kTile * kSlice * 2;
constexpr int kTiles = 4;  // tiles that share one read of x

// d += a b in two steps, from eight elements of two weight rows and of one row of x.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint4& top, const uint4& bottom, const uint4& x) {
  mma<T>(d, {top.x, bottom.x, top.y, bottom.y}, x.x, x.y);
  mma<T>(d, {top.z, bottom.z, top.w, bottom.w}, x.z, x.w);
}

// Return a row of x. A row after the last reads the last one; it is not written.
template <class T>
__device__ __forceinline__ const T* x_row(const SmallMGemmParams& p, int64_t row) {
  return static_cast<const T*>(p.x) + (row < p.rows ? row : p.rows - 1) * p.x_stride;
}
// Return the output columns per tile. A gated tile has eight gate rows and eight up rows.
SD_HD int outs_per_tile(const SmallMGemmParams& p) { return p.gated ? kTile / 2 : kTile; }
template <class T>
__device__ __forceinline__ const T* weight_row(const SmallMGemmParams& p, int64_t tile, int i) {
  const int64_t row = p.gated ? tile * (kTile / 2) + i % 8 + i / 8 * p.out : tile * kTile + i;
  return static_cast<const T*>(p.weight) + (p.gated || row < p.out ? row : p.out - 1) * p.weight_stride;
}

// The warps' partial sums of one tile, [rows of x][rows of the weight].
template <int kWarps>
class TileSums {
 public:
  __device__ void put(int warp, int lane, const float (&sum)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) warp_sums[warp][lane % 4 * 2 + e % 2][e / 2 * 8 + lane / 4] = sum[e];
  }
  // Write the tile's part of y; called by all warps after each has put its sums.
  template <class T>
  __device__ void write(const SmallMGemmParams& p, int64_t tile, int thread) const {
    const int outs = outs_per_tile(p);
    for (int i = thread; i < kRows * outs; i += kWarps * kWarp) {
      const int64_t r = int64_t{blockIdx.y} * kRows + i / outs, n = tile * outs + i % outs;
      if (r >= p.rows || n >= p.out) continue;
      float value = total<T>(p, i / outs, i % outs, n);
      if (p.gated) value = silu_mul(value, total<T>(p, i / outs, kTile / 2 + i % outs, p.out + n));
      p.put<T>(p.y_row(r), n, value);
    }
  }

 private:
  template <class T>
  __device__ float total(const SmallMGemmParams& p, int x_row, int row, int64_t weight_row) const {
    float sum = p.bias ? to_float(static_cast<const T*>(p.bias)[weight_row]) : 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += warp_sums[w][x_row][row];
    return sum;
  }

  float warp_sums[kWarps][kRows][kTile + 4];
};

// A warp's slices in order: for each group of tiles, along K, tile by tile.
struct Walk {
  int64_t group, end;
  int slices;  // along K
  int slice = 0, tile = 0;

  __device__ bool done() const { return group >= end; }
  __device__ int count() const { return static_cast<int>(min(end - group, int64_t{kTiles})); }
  __device__ void advance() {
    if (++tile < count()) return;
    tile = 0;
    if (++slice < slices) return;
    slice = 0;
    group += kTiles;
  }
};

template <class T, int kWarps, int kDepth>
__global__ void __launch_bounds__(kWarps* kWarp, 1) small_m_gemm_kernel(SmallMGemmParams p) {
  extern __shared__ __align__(128) unsigned char dynamic[];
  __shared__ TileSums<kWarps> sums[2];  // for alternate tiles
  const int lane = threadIdx.x, warp = threadIdx.y;
  unsigned char* const ring = dynamic + warp * kDepth * kSliceBytes;
  let_next_kernel_start();

  const int64_t tiles = (p.out + outs_per_tile(p) - 1) / outs_per_tile(p);
  const int64_t first_tile = tiles * blockIdx.x / gridDim.x, end_tile = tiles * (blockIdx.x + 1) / gridDim.x;
  const int all_slices = static_cast<int>(p.in / kSlice);
  const int slices = (all_slices - warp + kWarps - 1) / kWarps;  // this warp's: every kWarps-th from its own index on
  Walk reading{first_tile, slices > 0 ? end_tile : first_tile, slices};

  // Copy 16 bytes of row lane / 8 and of every fourth row after it. Odd rows swap their halves, so rows that are read
  // together have no bank conflicts.
  const auto fetch = [&](int stage) {
    if (!reading.done()) {
      const int64_t at = (int64_t{reading.slice} * kWarps + warp) * kSlice + lane % 8 * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i * 4 + lane / 8;
        copy_async(ring + stage * kSliceBytes + row * 128 + ((lane % 8) ^ (row % 2 * 4)) * 16,
                   weight_row<T>(p, reading.group + reading.tile, row) + at);
      }
      reading.advance();
    }
    commit_copies();
  };
#pragma unroll 1
  for (int stage = 0; stage < kDepth - 1; ++stage) fetch(stage);

  const int row = lane / 4;
  const T* const x = x_row<T>(p, int64_t{blockIdx.y} * kRows + row) + warp * kSlice + lane % 4 * 8;
  uint4 b[2], next[2];
  const auto read_x = [&](int slice, uint4(&to)[2]) {
#pragma unroll
    for (int u = 0; u < 2; ++u) to[u] = *reinterpret_cast<const uint4*>(x + int64_t{slice} * kWarps * kSlice + u * 32);
  };
  wait_for_kernels_before();

  int stage = 0, written = 0;
  for (int64_t group = first_tile; group < end_tile; group += kTiles) {
    const int count = static_cast<int>(min(end_tile - group, int64_t{kTiles}));
    float sum[kTiles][4] = {};
    if (slices > 0) read_x(0, b);
    for (int slice = 0; slice < slices; ++slice) {
      if (slice + 1 < slices) read_x(slice + 1, next);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (i >= count) break;
        wait_for_copies<kDepth - 2>();
        __syncwarp();
        const unsigned char* const from = ring + stage * kSliceBytes + row * 128;
        uint4 a[2][2];
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            a[u][half] =
                *reinterpret_cast<const uint4*>(from + half * 8 * 128 + ((u * 4 + lane % 4) ^ (row % 2 * 4)) * 16);
        // The previous slice has been read by all lanes, so its stage is free.
        fetch(stage == 0 ? kDepth - 1 : stage - 1);
#pragma unroll
        for (int u = 0; u < 2; ++u) multiply<T>(sum[i], a[u][0], a[u][1], b[u]);
        if (++stage == kDepth) stage = 0;
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) b[u] = next[u];
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i >= count) break;
      auto& tile_sums = sums[written++ % 2];  // all warps have written the previous tile before anyone fills this one
      tile_sums.put(warp, lane, sum[i]);
      __syncthreads();
      tile_sums.template write<T>(p, group + i, warp * kWarp + lane);
    }
  }
}

}  // namespace

void small_m_gemm_cuda(const SmallMGemmParams& p, Stream stream) {
  if (p.plan == GemmPlan::kWgmma) return wgmma_small_m_gemm(p, stream);
  int device = 0, most = 0;
  SD_CUDA_CHECK("small_m_gemm", cudaGetDevice(&device));
  SD_CUDA_CHECK("small_m_gemm", cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const int64_t tiles = (p.out + outs_per_tile(p) - 1) / outs_per_tile(p);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, current_device("small_m_gemm").num_sms));
  const auto start = [&]<class T, int kWarps, int kDepth>() {
    const int bytes = kWarps * kDepth * kSliceBytes;
    const auto kernel = small_m_gemm_kernel<T, kWarps, kDepth>;
    SD_CUDA_CHECK("small_m_gemm", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    launch("small_m_gemm", kernel,
           {.grid = {blocks, static_cast<unsigned>((p.rows + kRows - 1) / kRows)},
            .threads = dim3(kWarp, kWarps),
            .shared_bytes = static_cast<size_t>(bytes)},
           stream, p);
  };
  const auto of_type = [&]<class T>() {
    constexpr int kWarps = 16, kDepth = 6;
    if (most >= kWarps * kDepth * kSliceBytes + static_cast<int>(2 * sizeof(TileSums<kWarps>)))
      start.template operator()<T, kWarps, kDepth>();
    else
      start.template operator()<T, 8, 4>();
  };
  if (p.dtype == kBFloat16)
    of_type.template operator()<BFloat16>();
  else
    of_type.template operator()<Half>();
}

}  // namespace specdec::layers
