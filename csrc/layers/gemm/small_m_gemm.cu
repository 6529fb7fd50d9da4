// small_m_gemm by mma.sync, for eight rows at a time (grid.y): before and after Hopper.
//
// A block a multiprocessor, each with its share of 16-row tiles of the weight, of which every warp reads and multiplies
// a part of the length; they add up at the end. Reads the weight once, and x once a block and group of tiles, mostly
// from caches: the floor is the weight over the bandwidth.
//
// m16n8k16, rows of the weight as its rows and rows of x as its columns. Which numbers along a row stand together in a
// step is free as long as both operands agree: a thread's eight of two steps are neighbours, so that 16-byte reads
// serve both, without a transposition. Each warp keeps its own ring of slices of the weight on their way to shared
// memory (cp.async, 128 bytes of each of 16 rows) and waits for no other warp.
//
// A round is a chain of such products with small kernels between them, during which the memory would idle; so this
// kernel starts while those still run (programmatic dependent launch), and fills its rings before x is there: none of
// them writes the weight.
#include <algorithm>

#include "core/copy_async.cuh"
#include "core/mma.cuh"
#include "core/wgmma.cuh"
#include "layers/activation/silu_and_mul.h"
#include "layers/gemm/small_m_gemm.h"

namespace specdec::layers {
namespace {

constexpr int kRows = 8;    // of x, in a step
constexpr int kTile = 16;   // rows of the weight in a step
constexpr int kSlice = 64;  // numbers of a row that a warp takes at a time: four steps
constexpr int kSliceBytes = kTile * kSlice * 2;
constexpr int kTiles = 4;  // at a time, which share what is read of x

// d += a b, two steps: a thread's eight numbers of two rows of the weight and of one of x.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint4& top, const uint4& bottom, const uint4& x) {
  mma<T>(d, {top.x, bottom.x, top.y, bottom.y}, x.x, x.y);
  mma<T>(d, {top.z, bottom.z, top.w, bottom.w}, x.z, x.w);
}

// Rows beyond the last are read as the last, and not written.
template <class T>
__device__ __forceinline__ const T* x_row(const SmallMGemmParams& p, int64_t row) {
  return static_cast<const T*>(p.x) + (row < p.rows ? row : p.rows - 1) * p.x_stride;
}
// Numbers of a row of y that a tile makes. A gated one has eight gates, and eight rows of what is gated.
SD_HD int outs_of_tile(const SmallMGemmParams& p) { return p.gated ? kTile / 2 : kTile; }
template <class T>
__device__ __forceinline__ const T* weight_row(const SmallMGemmParams& p, int64_t tile, int i) {
  const int64_t row = p.gated ? tile * (kTile / 2) + i % 8 + i / 8 * p.out : tile * kTile + i;
  return static_cast<const T*>(p.weight) + (p.gated || row < p.out ? row : p.out - 1) * p.weight_stride;
}

// The warps' sums of one tile, [x's rows][weight's rows].
template <int kWarps>
class TileSums {
 public:
  __device__ void put(int warp, int lane, const float (&sum)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) of_warp[warp][lane % 4 * 2 + e % 2][e / 2 * 8 + lane / 4] = sum[e];
  }
  // By all warps, when all have put theirs: writes the tile's part of y.
  template <class T>
  __device__ void write(const SmallMGemmParams& p, int64_t tile, int thread) const {
    const int outs = outs_of_tile(p);
    for (int i = thread; i < kRows * outs; i += kWarps * kWarp) {
      const int64_t r = int64_t{blockIdx.y} * kRows + i / outs, n = tile * outs + i % outs;
      if (r >= p.rows || n >= p.out) continue;
      float value = total<T>(p, i / outs, i % outs, n);
      if (p.gated) value = gated(value, total<T>(p, i / outs, kTile / 2 + i % outs, p.out + n));
      static_cast<T*>(p.y)[r * p.y_stride + n] = from_float<T>(value);
    }
  }

 private:
  template <class T>
  __device__ float total(const SmallMGemmParams& p, int x_row, int row, int64_t weight_row) const {
    float sum = p.bias ? to_float(static_cast<const T*>(p.bias)[weight_row]) : 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += of_warp[w][x_row][row];
    return sum;
  }

  float of_warp[kWarps][kRows][kTile + 4];
};

// A warp's slices in order: of every group of tiles, along the length, tile by tile.
struct Walk {
  int64_t group, end;
  int slices;  // along the length
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
  __shared__ TileSums<kWarps> sums[2];  // of every other tile
  const int lane = threadIdx.x, warp = threadIdx.y;
  unsigned char* const ring = dynamic + warp * kDepth * kSliceBytes;
  let_next_kernel_start();

  const int64_t tiles = (p.out + outs_of_tile(p) - 1) / outs_of_tile(p);
  const int64_t first_tile = tiles * blockIdx.x / gridDim.x, end_tile = tiles * (blockIdx.x + 1) / gridDim.x;
  const int all_slices = static_cast<int>(p.in / kSlice);
  const int slices = (all_slices - warp + kWarps - 1) / kWarps;  // this warp's: its number, and every kWarps-th
  Walk reading{first_tile, slices > 0 ? end_tile : first_tile, slices};

  // Sixteen bytes each of row lane / 8 and every fourth, whose halves change places in odd rows: so the rows that are
  // read together meet in no bank.
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
    asm volatile("cp.async.commit_group;" ::: "memory");
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
        asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 2) : "memory");
        __syncwarp();
        const unsigned char* const from = ring + stage * kSliceBytes + row * 128;
        uint4 a[2][2];
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            a[u][half] =
                *reinterpret_cast<const uint4*>(from + half * 8 * 128 + ((u * 4 + lane % 4) ^ (row % 2 * 4)) * 16);
        // The slice read before this one is everybody's no more.
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
      auto& of_tile = sums[written++ % 2];  // whoever puts into it has seen all write the one before
      of_tile.put(warp, lane, sum[i]);
      __syncthreads();
      of_tile.template write<T>(p, group + i, warp * kWarp + lane);
    }
  }
}

}  // namespace

void small_m_gemm_cuda(const SmallMGemmParams& p, Stream stream) {
  if (p.plan == LinearPlan::kWgmma) return wgmma_small_m_gemm(p, stream);
  int device = 0, most = 0;
  SD_CUDA_CHECK("small_m_gemm", cudaGetDevice(&device));
  SD_CUDA_CHECK("small_m_gemm", cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const int64_t tiles = (p.out + outs_of_tile(p) - 1) / outs_of_tile(p);
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
