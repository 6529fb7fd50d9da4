// linear_rows on Hopper: wgmma, with rows of the weight as its 64 rows and rows of x as its columns.
//
// Grid: a block for each multiprocessor. The weight alone counts, so all of shared memory is a ring of it on its way in
// (TMA, slices of 64 numbers of each row), with the same slices of x beside it; a warp copies, and a warpgroup for each
// of up to four tiles multiplies. A tile has as many rows as make the blocks' shares even, 64 at most; wgmma multiplies
// 64 whatever they are. Where the weight has few rows, so that x would be read as often as it, two blocks (a cluster)
// share theirs, take half of the length each, and add up. How the work is cut depends on the weight's shape alone, so a
// row's bits do not depend on what stands beside it, or how much.
//
// A round is a chain of such products with small kernels between them, during which the memory would idle; so this
// kernel starts while those still run (programmatic dependent launch), and fills its ring before x is there: none of
// them writes the weight.
#include <cuda.h>

#include <algorithm>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/cluster.cuh"
#include "core/errors.h"
#include "core/mbarrier.cuh"
#include "core/wgmma.cuh"
#include "layers/linear_rows.h"

namespace specdec {
namespace {

constexpr int kTile = 64;     // rows of the weight that a warpgroup multiplies, of which a tile may fill the first ones
constexpr int kSlice = 64;    // numbers of a row that lie together: 128 bytes, a row of a swizzled panel
constexpr int kMaxTiles = 4;  // in a stage, a warpgroup for each
constexpr int kMaxDepth = 4, kEnoughStages = 6, kMaxStages = 24;
constexpr int kRingBytes = 220 * 1024;
constexpr int kWarpgroup = 4 * kWarp;
constexpr int kPartRow = kTile + 4;  // floats of a column of partial sums: lanes meet in no bank

struct WgmmaLinearRows {
  CUtensorMap weight, x;
  LinearRowsParams p;
  int tile_rows;      // a multiple of 8, so that panels start on 1024 bytes
  int tiles;          // of a block, or of the two of a cluster
  int tiles_at_once;  // of a stage
  int depth;          // slices of a stage
  int stages;

  __device__ int panel_bytes() const { return tile_rows * 128; }
};

// The part of the work that is this block's: tiles first to end, in groups that share what is read of x; and of the
// length, slices from first_slice on.
struct Share {
  int first, end, first_slice, slices;

  __device__ explicit Share(const WgmmaLinearRows& w) {
    const int split = static_cast<int>(Cluster::size()), rank = static_cast<int>(Cluster::rank());
    first = static_cast<int>(blockIdx.x) / split * w.tiles;
    end = min(first + w.tiles, static_cast<int>((w.p.out + w.tile_rows - 1) / w.tile_rows));
    slices = static_cast<int>(w.p.in / kSlice) / split;
    first_slice = slices * rank;
  }
};

// Where a walk through the ring is: its parity is that of the phase it waits for.
struct Turn {
  int at = 0;
  unsigned parity = 0;
  __device__ void advance(int stages) {
    if (++at < stages) return;
    at = 0;
    parity ^= 1;
  }
};

template <class T, int kColumns>
class LinearRows {
 public:
  static constexpr int kXBytes = kColumns * 128;
  struct Barriers {
    Mbarrier full[kMaxStages], empty[kMaxStages];
  };

  __device__ LinearRows(const WgmmaLinearRows& w, Barriers& barriers, unsigned char* ring)
      : w_(w), share_(w), barriers_(barriers), ring_(ring) {}

  // By one thread.
  __device__ void copy() {
    // What fits is on its way before x is there, and x follows.
    Walk weights = walk(), xs = walk();
    for (int stage = 0; stage < w_.stages && !weights.done(); ++stage) {
      expect(weights, stage);
      copy_weight(weights, stage);
      weights.advance();
    }
    wait_for_kernels_before();
    for (int stage = 0; stage < w_.stages && !xs.done(); ++stage) {
      copy_x(xs, stage);
      xs.advance();
    }
    for (Turn turn; !weights.done(); turn.advance(w_.stages)) {
      barriers_.empty[turn.at].wait(turn.parity);
      expect(weights, turn.at);
      copy_weight(weights, turn.at);
      copy_x(weights, turn.at);
      weights.advance();
    }
  }

  // By each warpgroup, for its tile of each group.
  __device__ void multiply() {
    const int mine = threadIdx.x / kWarpgroup;
    Sums sums = {};
    Turn turn;
    wait_for_kernels_before();  // of whom one may still write to `out`
    for (int group = share_.first; group < share_.end; group += w_.tiles_at_once) {
      const bool present = group + mine < share_.end;
      int before = -1;
      for (int slice = 0; slice < share_.slices; slice += w_.depth) {
        barriers_.full[turn.at].wait(turn.parity);
        if (present) {
          pin(sums);
          cute::warpgroup_arrive();
          uint64_t weight = wgmma_operand(stage_at(turn.at) + mine * tile_bytes(), 0);
          uint64_t x = wgmma_operand(x_of(turn.at), 0);
          for (int i = 0; i < w_.depth; ++i, weight += w_.panel_bytes() >> 4, x += kXBytes >> 4)
#pragma unroll
            for (int k = 0; k < kSlice / 16; ++k)
              Multiply::multiply(weight + 2 * k, x + 2 * k, slice > 0 || i > 0 || k > 0, sums);
          cute::warpgroup_commit_batch();
          cute::warpgroup_wait<1>();
        }
        if (before >= 0) release(before);
        before = turn.at;
        turn.advance(w_.stages);
      }
      cute::warpgroup_wait<0>();
      pin(sums);
      if (before >= 0) release(before);
      if (Cluster::size() > 1) {
        sync_warpgroups();  // the ring is nobody's any more: there is one group
        put(mine, present, sums);
      } else if (present) {
        write(group + mine, sums);
      }
    }
  }

  // What both blocks of a cluster put, added up, each block half of the rows.
  __device__ void add_up() {
    Cluster::sync();
    const int quads = (share_.end - share_.first) * w_.tile_rows / 8, first = static_cast<int>(Cluster::rank()) * quads;
    for (int i = threadIdx.x; i < quads * w_.p.rows; i += w_.tiles_at_once * kWarpgroup) {
      const int column = i / quads, row = (first + i % quads) * 4;
      float* const place = sums_of(row / w_.tile_rows, column) + row % w_.tile_rows;
      const float4 a = *reinterpret_cast<const float4*>(Cluster::at(place, 0));
      const float4 b = *reinterpret_cast<const float4*>(Cluster::at(place, 1));
      const int64_t out = int64_t{share_.first} * w_.tile_rows + row;
      put_out(column, out, a.x + b.x), put_out(column, out + 1, a.y + b.y);
      put_out(column, out + 2, a.z + b.z), put_out(column, out + 3, a.w + b.w);
    }
    Cluster::sync();  // the other may still read this block's
  }

 private:
  using Multiply = Wgmma<T, kColumns, cute::SM90::GMMA::Major::K>;
  using Sums = float[kColumns / 8][4];

  // The stages in the order they are filled.
  struct Walk {
    int group, slice, end_group, slices, tiles_at_once, depth;
    __device__ bool done() const { return group >= end_group; }
    __device__ int tiles() const { return min(end_group - group, tiles_at_once); }
    __device__ void advance() {
      if ((slice += depth) < slices) return;
      slice = 0;
      group += tiles_at_once;
    }
  };
  __device__ Walk walk() const { return {share_.first, 0, share_.end, share_.slices, w_.tiles_at_once, w_.depth}; }

  // A stage: of each tile its slices, panel after panel, and then those of x.
  __device__ int tile_bytes() const { return w_.depth * w_.panel_bytes(); }
  __device__ int x_bytes() const { return w_.depth * kXBytes; }
  __device__ unsigned char* stage_at(int stage) const {
    return ring_ + stage * (w_.tiles_at_once * tile_bytes() + x_bytes());
  }
  __device__ unsigned char* x_of(int stage) const { return stage_at(stage) + w_.tiles_at_once * tile_bytes(); }

  __device__ void expect(const Walk& walk, int stage) const {
    cute::set_barrier_transaction_bytes(barriers_.full[stage].state, walk.tiles() * tile_bytes() + x_bytes());
  }
  __device__ void copy_weight(const Walk& walk, int stage) const {
    for (int i = 0; i < walk.tiles(); ++i)
      copy(w_.weight, stage, cute::TMA::CacheHintSm90::EVICT_FIRST, stage_at(stage) + i * tile_bytes(),
           (walk.group + i) * w_.tile_rows, walk.slice);
  }
  __device__ void copy_x(const Walk& walk, int stage) const {
    copy(w_.x, stage, cute::TMA::CacheHintSm90::EVICT_LAST, x_of(stage), 0, walk.slice);
  }
  __device__ void copy(const CUtensorMap& from, int stage, cute::TMA::CacheHintSm90 hint, void* to, int row,
                       int slice) const {
    cute::SM90_TMA_LOAD_3D::copy(&from, &barriers_.full[stage].state, static_cast<uint64_t>(hint), to, 0, row,
                                 share_.first_slice + slice);
  }
  __device__ void release(int stage) {
    if (threadIdx.x % kWarp == 0) barriers_.empty[stage].arrive();
  }

  // A block's sums of a tile, for one row of x; they lie where the ring was.
  __device__ float* sums_of(int tile, int column) const {
    return reinterpret_cast<float*>(ring_) + (tile * kColumns + column) * kPartRow;
  }
  // A thread's sums are of rows lane / 4 and lane / 4 + 8 of its warp's 16, and of columns 2 (lane % 4) and the next.
  template <class F>
  __device__ static void for_each_sum(const Sums& sums, F&& f) {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        f(thread / kWarp * 16 + e / 2 * 8 + lane / 4, n * 8 + lane % 4 * 2 + e % 2, sums[n][e]);
  }
  __device__ void put(int tile, bool present, const Sums& sums) const {
    if (present) for_each_sum(sums, [&](int row, int column, float sum) { sums_of(tile, column)[row] = sum; });
  }
  __device__ void write(int tile, const Sums& sums) const {
    for_each_sum(sums, [&](int row, int column, float sum) {
      if (row < w_.tile_rows) put_out(column, int64_t{tile} * w_.tile_rows + row, sum);
    });
  }
  __device__ void sync_warpgroups() const {
    asm volatile("bar.sync 1, %0;" ::"r"(w_.tiles_at_once * kWarpgroup) : "memory");
  }
  __device__ void put_out(int row, int64_t out, float sum) const {
    if (row >= w_.p.rows || out >= w_.p.out) return;
    if (w_.p.bias) sum += to_float(static_cast<const T*>(w_.p.bias)[out]);
    static_cast<T*>(w_.p.y)[row * w_.p.y_stride + out] = from_float<T>(sum);
  }

  const WgmmaLinearRows& w_;
  const Share share_;
  Barriers& barriers_;
  unsigned char* const ring_;
};

template <class T, int kColumns>
__global__ void __launch_bounds__(kMaxTiles* kWarpgroup + kWarp, 1)
    wgmma_linear_rows_kernel(const __grid_constant__ WgmmaLinearRows w) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Kernel = LinearRows<T, kColumns>;
  extern __shared__ __align__(1024) unsigned char ring[];
  __shared__ typename Kernel::Barriers barriers;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&w.weight));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&w.x));
    for (int i = 0; i < w.stages; ++i) {
      barriers.full[i].init(1);
      barriers.empty[i].init(4 * w.tiles_at_once);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  Kernel kernel(w, barriers, ring);
  if (static_cast<int>(threadIdx.x) >= w.tiles_at_once * kWarpgroup) {
    if (threadIdx.x % kWarp == 0) kernel.copy();
    // It has nothing to add, but a cluster's barrier waits for all who have not left.
    return;
  }
  kernel.multiply();
  if (Cluster::size() > 1) kernel.add_up();
#endif
}

// Rows as slices, of which a copy takes `depth` of each of `box_rows` rows: panels one after the other. The driver's
// function for that is asked for at run time: the module links no driver.
CUtensorMap tensor_map(const void* data, Dtypes dtype, int64_t rows, int64_t width, int64_t stride, int box_rows,
                       int depth) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    SD_CUDA_CHECK("linear_rows", cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                                  cudaEnableDefault, &found));
    if (function == nullptr) throw CudaError("linear_rows: the driver has no cuTensorMapEncodeTiled, expected CUDA 12");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  CUtensorMap map;
  const cuuint64_t sizes[] = {kSlice, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(width) / kSlice};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(rows > 1 ? stride : width) * 2, kSlice * 2};
  const cuuint32_t box[] = {kSlice, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(depth)};
  const cuuint32_t step[] = {1, 1, 1};
  const auto type = dtype == kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (encode(&map, type, 3, const_cast<void*>(data), sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
    throw CudaError("linear_rows: the driver refused to describe a tensor");
  return map;
}

// How a weight is shared out.
struct Cut {
  int split, clusters, tile_rows, tiles, tiles_at_once, depth, stages, bytes;

  Cut(int out, int slices, int columns, int multiprocessors) {
    const auto parts = [](int whole, int part) { return (whole + part - 1) / part; };
    split = slices % 2 == 0 && parts(out, multiprocessors / 2) <= kMaxTiles * kTile ? 2 : 1;
    const int rows = parts(out, multiprocessors / split);
    tiles = parts(rows, kTile);
    tile_rows = parts(parts(rows, tiles), 8) * 8;
    clusters = parts(out, tiles * tile_rows);
    tiles_at_once = parts(tiles, parts(tiles, kMaxTiles));
    // wgmma reads what is behind a tile of fewer rows as well, wherever it ends.
    const int behind = (kTile - tile_rows) * 128, slice = (tiles_at_once * tile_rows + columns) * 128;
    // A copy and a barrier for each slice of few rows would cost more time than its bytes.
    for (depth = 1; depth < kMaxDepth && slices % (2 * depth * split) == 0;) {
      if (kEnoughStages * 2 * depth * slice + behind > kRingBytes) break;
      depth *= 2;
    }
    stages = std::min(kMaxStages, (kRingBytes - behind) / (depth * slice));
    const int sums = split > 1 ? tiles * columns * kPartRow * static_cast<int>(sizeof(float)) : 0;
    bytes = std::max(stages * depth * slice + behind, sums);
  }
};

template <class T, int kColumns>
void start(const LinearRowsParams& p, Stream stream) {
  const Cut cut(static_cast<int>(p.out), static_cast<int>(p.in / kSlice), kColumns,
                current_device("linear_rows").multiprocessors);
  const WgmmaLinearRows w{
      .weight = tensor_map(p.weight, p.dtype, p.out, p.in, p.weight_stride, cut.tile_rows, cut.depth),
      .x = tensor_map(p.x, p.dtype, p.rows, p.in, p.x_stride, kColumns, cut.depth),
      .p = p,
      .tile_rows = cut.tile_rows,
      .tiles = cut.tiles,
      .tiles_at_once = cut.tiles_at_once,
      .depth = cut.depth,
      .stages = cut.stages,
  };
  const auto kernel = wgmma_linear_rows_kernel<T, kColumns>;
  SD_CUDA_CHECK("linear_rows", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, cut.bytes));
  launch("linear_rows", kernel,
         {.grid = static_cast<unsigned>(cut.clusters * cut.split),
          .threads = static_cast<unsigned>(cut.tiles_at_once * kWarpgroup + kWarp),
          .shared_bytes = static_cast<size_t>(cut.bytes),
          .cluster = static_cast<unsigned>(cut.split)},
         stream, w);
}

}  // namespace

void wgmma_linear_rows(const LinearRowsParams& p, Stream stream) {
  const auto of_type = [&]<class T>() {
    if (p.rows <= 8) return start<T, 8>(p, stream);
    if (p.rows <= 16) return start<T, 16>(p, stream);
    if (p.rows <= 32) return start<T, 32>(p, stream);
    start<T, 64>(p, stream);
  };
  if (p.dtype == kBFloat16)
    of_type.template operator()<BFloat16>();
  else
    of_type.template operator()<Half>();
}

}  // namespace specdec
