// small-M batched GEMM with mma.sync: out[:, h] = x[:, h] weight[h].
//
// Grid: tiles of 16 to 64 output columns, heads, and groups of 8 or 16 rows, about one block per SM. A block copies its
// columns of the weight to shared memory at once, so all of the weights are in flight together and the lower bound is
// their bytes over bandwidth. It does so before x is ready (programmatic dependent launch): no kernel writes the
// weight. What is left after x is ready is one copy of x from caches, a few multiplications and the output.
//
// m16n8k16, with output columns as M and rows of x as N. The order of elements along K is free as long as both operands
// agree: a thread takes eight contiguous elements of x for two steps. If the weight is contiguous along K, a thread
// reads the same eight of a column, without ldmatrix. If it is contiguous along the columns, the rows of each 8 x 8
// matrix are stored next to each other, and ldmatrix transposes. Warps divide the columns, 16 each, and then K.
#include <cutlass/fast_math.h>

#include "core/copy_async.cuh"
#include "core/fragments.cuh"
#include "core/mma.cuh"
#include "core/warp.cuh"
#include "layers/gemm/small_m_bmm.h"

namespace specdec::layers {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kRows = 8;                  // of x, per multiplication
constexpr int kTile = 16;                 // output columns of a warp
constexpr int kUnit = 32;                 // elements along K that a warp takes at a time: two steps
constexpr int kChunk = 8;                 // elements of 16 bytes
constexpr int kMaxTileBytes = 48 * 1024;  // so that several blocks fit on an SM

// A block's part of a weight in shared memory: a row for each column, or a row for each element along K.
struct WeightTile {
  int warps;                   // that divide the columns, one to four
  int rows, pitch;             // pitch: bytes from row to row
  cutlass::FastDivmod chunks;  // of a row

  SD_HD int bytes() const { return rows * pitch; }
};

// Return the pitch of rows of `ins` elements without bank conflicts between four chunks of adjacent rows.
SD_HD int long_pitch(int ins) { return (ins / kChunk | 4) * 16; }

// Return where row k of a weight that is contiguous along its columns is stored. A thread has eight of 32 elements of
// x, two for each of four matrices; the rows that a matrix takes from four threads become adjacent.
__device__ __forceinline__ int stored_row(int k) {
  return k / kUnit * kUnit + k % 8 / 2 * 8 + k % kUnit / 8 * 2 + k % 2;
}

template <class T, bool kColumnsContiguous, int kGroups>
__global__ void __launch_bounds__(kThreads) small_m_bmm_kernel(SmallMBmmParams p, WeightTile tile) {
  extern __shared__ __align__(128) unsigned char stored[];
  __shared__ float sums[kWarps][kGroups * kRows][kTile + 4];
  const int thread = threadIdx.x, lane = lane_id(), columns = tile.warps * kTile, ins = static_cast<int>(p.ins);
  const int64_t head = blockIdx.y, first_column = int64_t{blockIdx.x} * columns;
  let_next_kernel_start();

  const T* const weight =
      static_cast<const T*>(p.weight) + head * p.weight_strides[0] + first_column * p.weight_strides[2];
  const int64_t stride = p.weight_strides[kColumnsContiguous ? 1 : 2];
  for (int i = thread; i < tile.rows * tile.chunks.divisor; i += kThreads) {
    int row, chunk;
    tile.chunks(row, chunk, i);
    copy_async(stored + (kColumnsContiguous ? stored_row(row) : row) * tile.pitch + chunk * 16,
               weight + row * stride + chunk * kChunk);
  }

  // Rows after the last one are not copied: what they are multiplied to is not written.
  const int64_t first_row = int64_t{blockIdx.z} * kGroups * kRows;
  const int rows = static_cast<int>(min(p.rows - first_row, int64_t{kGroups * kRows}));
  const T* const x = static_cast<const T*>(p.x) + first_row * p.x_strides[0] + head * p.x_strides[1];
  unsigned char* const stored_x = stored + tile.bytes();
  const int x_pitch = long_pitch(ins);
  wait_for_kernels_before();
  for (int row = warp_id(); row < rows; row += kWarps)
    for (int chunk = lane; chunk < ins / kChunk; chunk += kWarp)
      copy_async(stored_x + row * x_pitch + chunk * 16, x + row * p.x_strides[0] + chunk * kChunk);
  commit_copies();

  // This warp's columns, and its units of K: from `part` on, every `parts`-th.
  const int warp_tile = warp_id() % tile.warps, part = warp_id() / tile.warps, parts = kWarps / tile.warps;
  // Read 16 columns and a unit of K, the A operands of its two steps.
  const auto read_weight = [&](int unit, uint32_t (&a)[2][4]) {
    if constexpr (kColumnsContiguous) {
      const unsigned char* const from =
          stored + (unit * kUnit + lane / 16 * 8 + lane % 8) * tile.pitch + (warp_tile * kTile + lane / 8 % 2 * 8) * 2;
#pragma unroll
      for (int step = 0; step < 2; ++step) load_transposed_matrices(a[step], from + step * 16 * tile.pitch);
    } else {
      const unsigned char* const from =
          stored + (warp_tile * kTile + lane / 4) * tile.pitch + (unit * 4 + lane % 4) * 16;
      const uint4 top = *reinterpret_cast<const uint4*>(from);
      const uint4 bottom = *reinterpret_cast<const uint4*>(from + 8 * tile.pitch);
      a[0][0] = top.x, a[0][1] = bottom.x, a[0][2] = top.y, a[0][3] = bottom.y;
      a[1][0] = top.z, a[1][1] = bottom.z, a[1][2] = top.w, a[1][3] = bottom.w;
    }
  };
  wait_for_copies<0>();
  __syncthreads();
  float sum[kGroups][2][4] = {};
#pragma unroll 2
  for (int unit = part; unit < ins / kUnit; unit += parts) {
    uint32_t a[2][4];
    read_weight(unit, a);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint4 b =
          *reinterpret_cast<const uint4*>(stored_x + (g * kRows + lane / 4) * x_pitch + (unit * 4 + lane % 4) * 16);
      mma<T>(sum[g][0], a[0], b.x, b.y);
      mma<T>(sum[g][1], a[1], b.z, b.w);
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      sums[warp_id()][g * kRows + lane % 4 * 2 + e % 2][e / 2 * 8 + lane / 4] = sum[g][0][e] + sum[g][1][e];
  __syncthreads();
  const int column = thread % columns;
  for (int r = thread / columns; r < rows; r += kThreads / columns) {
    float total = 0;
    for (int warp = column / kTile; warp < kWarps; warp += tile.warps) total += sums[warp][r][column % kTile];
    static_cast<T*>(p.out)[(first_row + r) * p.out_strides[0] + head * p.out_strides[1] + first_column + column] =
        from_float<T>(total);
  }
}

// Return the widest tile that leaves blocks for most SMs.
WeightTile tile_of(const SmallMBmmParams& p, int num_sms) {
  const bool columns_contiguous = p.weight_strides[2] == 1;
  const int ins = static_cast<int>(p.ins);
  for (int warps = 4;; warps /= 2) {
    const int columns = warps * kTile;
    // An odd number of chunks from row to row leaves ldmatrix without bank conflicts.
    const WeightTile tile = columns_contiguous ? WeightTile{warps, ins, (columns / kChunk + 1) * 16, columns / kChunk}
                                               : WeightTile{warps, columns, long_pitch(ins), ins / kChunk};
    const bool fits = p.outs % columns == 0 && p.heads * (p.outs / columns) >= num_sms * 3 / 4;
    if (warps == 1 || (fits && tile.bytes() <= kMaxTileBytes)) return tile;
  }
}

}  // namespace

void small_m_bmm_cuda(const SmallMBmmParams& p, Stream stream) {
  const WeightTile tile = tile_of(p, current_device("small_m_bmm").num_sms);
  const auto start = [&]<class T, bool kColumnsContiguous, int kGroups>() {
    const int bytes = tile.bytes() + kGroups * kRows * long_pitch(static_cast<int>(p.ins));
    const auto kernel = small_m_bmm_kernel<T, kColumnsContiguous, kGroups>;
    SD_CUDA_CHECK("small_m_bmm", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    const dim3 grid(static_cast<unsigned>(p.outs / (tile.warps * kTile)), static_cast<unsigned>(p.heads),
                    static_cast<unsigned>((p.rows + kGroups * kRows - 1) / (kGroups * kRows)));
    launch("small_m_bmm", kernel, {.grid = grid, .threads = kThreads, .shared_bytes = static_cast<size_t>(bytes)},
           stream, p, tile);
  };
  const auto of_type = [&]<class T>() {
    const auto with_groups = [&]<bool kColumnsContiguous>() {
      p.rows <= kRows ? start.template operator()<T, kColumnsContiguous, 1>()
                      : start.template operator()<T, kColumnsContiguous, 2>();
    };
    p.weight_strides[2] == 1 ? with_groups.template operator()<true>() : with_groups.template operator()<false>();
  };
  if (p.dtype == kBFloat16)
    of_type.template operator()<BFloat16>();
  else
    of_type.template operator()<Half>();
}

}  // namespace specdec::layers
