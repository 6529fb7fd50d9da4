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

#include "core/cuda.cuh"
#include "layers/linear_rows.h"

namespace specdec {
namespace {

constexpr int kTile = 16;    // rows of the weight, and
constexpr int kColumns = 8;  // of x, in a step
constexpr int kSlice = 64;   // numbers of a row that a warp takes at a time: four steps
constexpr int kSliceBytes = kTile * kSlice * 2;

// d += a b.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  if constexpr (std::is_same_v<T, BFloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Two steps: a thread's eight numbers of two rows of the weight and of one of x.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint4& top, const uint4& bottom, const uint4& x) {
  multiply<T>(d, top.x, bottom.x, top.y, bottom.y, x.x, x.y);
  multiply<T>(d, top.z, bottom.z, top.w, bottom.w, x.z, x.w);
}

// Rows beyond the last are read as the last, and not written.
template <class T>
__device__ __forceinline__ const T* x_row(const LinearRowsParams& p, int64_t row) {
  return static_cast<const T*>(p.x) + (row < p.rows ? row : p.rows - 1) * p.x_stride;
}

// The warps' sums of one tile, [x's rows][weight's rows].
template <int kWarps, int kParts>
struct TileSums {
  float of_warp[kWarps][kParts * kColumns][kTile + 4];

  __device__ void put(int warp, int lane, const float (&sum)[kParts][4]) {
#pragma unroll
    for (int m = 0; m < kParts; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) of_warp[warp][m * kColumns + lane % 4 * 2 + e % 2][e / 2 * 8 + lane / 4] = sum[m][e];
  }
  // By all warps, when all have put theirs: writes the tile's part of y.
  template <class T>
  __device__ void write(const LinearRowsParams& p, int64_t first, int thread) const {
    for (int i = thread; i < kParts * kColumns * kTile; i += kWarps * kWarp) {
      const int r = i / kTile, c = i % kTile;
      if (r >= p.rows || first + c >= p.out) continue;
      float total = p.bias ? to_float(static_cast<const T*>(p.bias)[first + c]) : 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += of_warp[w][r][c];
      static_cast<T*>(p.y)[r * p.y_stride + first + c] = from_float<T>(total);
    }
  }
};

// A warp's slices in order: of every group of the block's tiles, along the length, tile by tile.
template <int kTiles>
struct Walk {
  int end, slices;  // tiles, and slices along the length
  int group = 0, slice = 0, tile = 0;

  __device__ void advance() {
    if (++tile < min(end - group, kTiles)) return;
    tile = 0;
    if (++slice < slices) return;
    slice = 0;
    group += kTiles;
  }
};

__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from)
      : "memory");
}

// kTiles at a time share what is read of x.
template <class T, int kWarps, int kParts, int kDepth, int kTiles>
__global__ void __launch_bounds__(kWarps* kWarp, 1) linear_rows_kernel(LinearRowsParams p) {
  extern __shared__ __align__(128) unsigned char dynamic[];
  __shared__ TileSums<kWarps, kParts> sums[2];  // of every other tile
  const int lane = threadIdx.x, warp = threadIdx.y;
  unsigned char* const ring = dynamic + warp * kDepth * kSliceBytes;
  let_next_kernel_start();

  const int64_t all_tiles = (p.out + kTile - 1) / kTile;
  const int64_t first_row = all_tiles * blockIdx.x / gridDim.x * kTile;
  const int tiles = static_cast<int>(all_tiles * (blockIdx.x + 1) / gridDim.x - first_row / kTile);
  const int last_row = static_cast<int>(min(p.out - first_row, int64_t{tiles} * kTile)) - 1;
  const int all_slices = static_cast<int>(p.in / kSlice);
  const int slices = (all_slices - warp + kWarps - 1) / kWarps;  // this warp's: its number, and every kWarps-th
  Walk<kTiles> reading{slices > 0 ? tiles : 0, slices};

  // Sixteen bytes each of row lane / 8 and every fourth, whose halves change places in odd rows: so the rows that are
  // read together meet in no bank. Rows beyond the last are read as the last, and not written.
  const T* const weight = static_cast<const T*>(p.weight) + first_row * p.weight_stride + warp * kSlice + lane % 8 * 8;
  unsigned char* const place = ring + lane / 8 * 128 + ((lane % 8) ^ (lane / 8 % 2 * 4)) * 16;
  const auto fetch = [&](int stage) {
    if (reading.group < reading.end) {
      const int row = (reading.group + reading.tile) * kTile + lane / 8;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        copy_async(place + stage * kSliceBytes + i * 4 * 128,
                   weight + min(row + i * 4, last_row) * p.weight_stride + reading.slice * (kWarps * kSlice));
      reading.advance();
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll 1
  for (int stage = 0; stage < kDepth - 1; ++stage) fetch(stage);

  const int row = lane / 4;
  const T* x[kParts];
#pragma unroll
  for (int m = 0; m < kParts; ++m) x[m] = x_row<T>(p, m * kColumns + row) + warp * kSlice + lane % 4 * 8;
  uint4 b[2][kParts], next[2][kParts];
  const auto read_x = [&](int slice, uint4(&to)[2][kParts]) {
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int m = 0; m < kParts; ++m)
        to[u][m] = *reinterpret_cast<const uint4*>(x[m] + int64_t{slice} * kWarps * kSlice + u * 32);
  };
  wait_for_kernels_before();

  int stage = 0, written = 0;
  for (int group = 0; group < tiles; group += kTiles) {
    const int count = min(tiles - group, kTiles);
    float sum[kTiles][kParts][4] = {};
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
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int m = 0; m < kParts; ++m) multiply<T>(sum[i][m], a[u][0], a[u][1], b[u][m]);
        if (++stage == kDepth) stage = 0;
      }
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int m = 0; m < kParts; ++m) b[u][m] = next[u][m];
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i >= count) break;
      auto& of_tile = sums[written++ % 2];  // whoever puts into it has seen all write the one before
      of_tile.put(warp, lane, sum[i]);
      __syncthreads();
      of_tile.template write<T>(p, first_row + (group + i) * kTile, warp * kWarp + lane);
    }
  }
}

}  // namespace

void linear_rows_cuda(const LinearRowsParams& p, Stream stream) {
  const Device device = current_device("linear_rows");
  const auto start = [&]<class T, int kWarps, int kParts, int kDepth, int kTiles>() {
    const int bytes = kWarps * kDepth * kSliceBytes;
    SD_CUDA_CHECK("linear_rows", cudaFuncSetAttribute(linear_rows_kernel<T, kWarps, kParts, kDepth, kTiles>,
                                                      cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    const int64_t tiles = (p.out + kTile - 1) / kTile;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, device.multiprocessors));
    launch("linear_rows", linear_rows_kernel<T, kWarps, kParts, kDepth, kTiles>,
           {.grid = blocks, .threads = dim3(kWarp, kWarps), .shared_bytes = static_cast<size_t>(bytes)}, stream, p);
  };
  const auto of_type = [&]<class T>() {
    const bool few = p.rows <= kColumns;
    // Rings as deep as shared memory has room for, which before Hopper may be 99 kilobytes.
    if (!device.is_hopper_or_later)
      return few ? start.template operator()<T, 8, 1, 4, 4>() : start.template operator()<T, 8, 2, 4, 4>();
    few ? start.template operator()<T, 16, 1, 6, 4>() : start.template operator()<T, 16, 2, 5, 4>();
  };
  if (p.dtype == kBFloat16)
    of_type.template operator()<BFloat16>();
  else
    of_type.template operator()<Half>();
}

}  // namespace specdec
