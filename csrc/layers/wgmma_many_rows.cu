// linear_rows of more than 128 rows on Hopper: wgmma, with rows of x as its rows and rows of the weight as its columns.
//
// Grid: two blocks, a cluster, for each two multiprocessors, which take pairs of tiles in turn. A tile is 128 rows of x
// by 256 of the weight, or 192 by 192: whichever leaves fewer multiprocessors idle in the last turn. A warpgroup for
// each 64 rows multiplies; one warp copies slices of 64 numbers of each row into a ring (TMA), so far ahead that the
// next tile's are there when a tile is written. The two tiles of a pair stand below each other and share the rows of
// the weight, or, where the last would stand alone, beside each other and share those of x: each block copies half of
// what is shared, to both. Arithmetic is the floor: with the gate, and its two sums in one thread as in
// wgmma_linear_rows, 2048 rows at the clock that power allows.
#include <algorithm>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/cluster.cuh"
#include "core/mbarrier.cuh"
#include "core/tensor_map.h"
#include "core/wgmma.cuh"
#include "layers/gate_rows.h"
#include "layers/linear_rows.h"

namespace specdec {
namespace {

constexpr int kSlice = 64;  // numbers of a row that lie together: 128 bytes, a row of a swizzled panel
constexpr int kWarpgroup = 4 * kWarp, kGroupRows = 64;
constexpr int kPair = 2;  // blocks of a cluster
constexpr int kRingBytes = 226 * 1024;

struct ManyRows {
  CUtensorMap weight, x;
  LinearRowsParams p;
  bool share_weight;  // of a pair; else x
  int row_pairs, pairs, slices;
  bool wide;  // out can be written 16 bytes at a time
};

struct Tile {
  int row, column;  // of x, and of the weight
};

// Where a walk through the ring is, and how often it has been around.
template <int kStages>
struct Turn {
  int at = 0, lap = 0;
  __device__ void advance() {
    if (++at < kStages) return;
    at = 0;
    ++lap;
  }
};

template <class T, int kGroups, int kColumns, bool kGated>
class ManyRowsKernel {
 public:
  static constexpr int kRows = kGroups * kGroupRows;
  static constexpr int kXBytes = kRows * 128, kWeightBytes = kColumns * 128, kStageBytes = kXBytes + kWeightBytes;
  static constexpr int kStages = kRingBytes / kStageBytes;
  struct Barriers {
    Mbarrier full[kStages], empty[kStages];
  };

  __device__ ManyRowsKernel(const ManyRows& w, Barriers& barriers, unsigned char* ring)
      : w_(w), barriers_(barriers), ring_(ring), part_(static_cast<int>(Cluster::rank())) {}

  // By a thread.
  __device__ void copy() {
    wait_for_kernels_before();
    Turn<kStages> turn;
    for_each_tile([&](const Tile& tile) {
      for (int slice = 0; slice < w_.slices; ++slice, turn.advance()) {
        if (turn.lap > 0) barriers_.empty[turn.at].wait((turn.lap - 1) % 2);  // in both blocks
        cute::set_barrier_transaction_bytes(barriers_.full[turn.at].state, kStageBytes);
        copy_weight(turn.at, tile.column, slice * kSlice);
        copy_x(turn.at, tile.row, slice * kSlice);
      }
    });
  }

  // By each warpgroup, for its rows of each tile.
  __device__ void multiply() {
    const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
    wait_for_kernels_before();  // of whom one may still write to `out`
    Sums sums;
    Turn<kStages> turn;
    for_each_tile([&](const Tile& tile) {
      int before = -1;
      for (int slice = 0; slice < w_.slices; ++slice) {
        barriers_.full[turn.at].wait(turn.lap % 2);
        pin(sums);
        cute::warpgroup_arrive();
        const uint64_t x = wgmma_operand(stage(turn.at) + group * kGroupRows * 128, 0);
        const uint64_t weight = wgmma_operand(stage(turn.at) + kXBytes, 0);
#pragma unroll
        for (int k = 0; k < kSlice / 16; ++k) Multiply::multiply(x + 2 * k, weight + 2 * k, slice > 0 || k > 0, sums);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<1>();
        if (before >= 0) release(before);
        before = turn.at;
        turn.advance();
      }
      cute::warpgroup_wait<0>();
      pin(sums);
      release(before);
      write(tile.row + group * kGroupRows, tile.column, sums);
    });
  }

 private:
  using Multiply = Wgmma<T, kColumns, cute::SM90::GMMA::Major::K>;
  using Sums = float[kColumns / 8][4];

  // Pairs that stand below each other follow each other: together they read a part of the weight.
  template <class F>
  __device__ void for_each_tile(F f) const {
    for (int pair = static_cast<int>(blockIdx.x) / kPair; pair < w_.pairs;
         pair += static_cast<int>(gridDim.x) / kPair) {
      const int row = pair % w_.row_pairs, column = pair / w_.row_pairs;
      f(Tile{.row = (w_.share_weight ? row * kPair + part_ : row) * kRows,
             .column = (w_.share_weight ? column : column * kPair + part_) * kColumns});
    }
  }

  __device__ unsigned char* stage(int stage) const { return ring_ + stage * kStageBytes; }

  __device__ void copy_weight(int at, int column, int k) {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    uint64_t* const full = &barriers_.full[at].state;
    unsigned char* to = stage(at) + kXBytes;
    if (w_.share_weight) {
      to += part_ * kWeightBytes / kPair, column += part_ * kColumns / kPair;
      if constexpr (kGated)
        cute::SM90_TMA_LOAD_MULTICAST_4D::copy(&w_.weight, full, kBoth, kHint, to, k, 0, 0, column / 16);
      else
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&w_.weight, full, kBoth, kHint, to, k, column);
    } else {
      if constexpr (kGated)
        cute::SM90_TMA_LOAD_4D::copy(&w_.weight, full, kHint, to, k, 0, 0, column / 16);
      else
        cute::SM90_TMA_LOAD_2D::copy(&w_.weight, full, kHint, to, k, column);
    }
  }
  __device__ void copy_x(int at, int row, int k) {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
    uint64_t* const full = &barriers_.full[at].state;
    if (w_.share_weight)
      cute::SM90_TMA_LOAD_2D::copy(&w_.x, full, kHint, stage(at), k, row);
    else
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&w_.x, full, kBoth, kHint, stage(at) + part_ * kXBytes / kPair, k,
                                             row + part_ * kRows / kPair);
  }

  // By a thread for each block of the pair: wgmma has read what it has for the whole warpgroup. (What releases to the
  // whole cluster would wait for all writes of the thread, which takes longer than a slice.)
  __device__ void release(int at) {
    const unsigned block = threadIdx.x % kWarpgroup;
    if (block >= kPair) return;
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(
            static_cast<uint32_t>(__cvta_generic_to_shared(&barriers_.empty[at].state))),
        "r"(block)
        : "memory");
  }

  // A thread has sums of rows lane / 4 and lane / 4 + 8 of its warp's 16, and of columns 2 (lane % 4) and the next of
  // every eight; the four lanes of a row exchange them, so that each writes eight neighbours. Of gated columns eight
  // are gates and the next eight what is gated.
  __device__ void write(int first_row, int column, const Sums& sums) const {
    const LinearRowsParams& p = w_.p;
    constexpr int kEights = kGated ? 2 : 1, kOuts = kColumns / kEights;
    const int warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp;
    const int64_t first_out = column / kEights;
#pragma unroll
    for (int n = 0; n < kOuts / 8; n += 4) {
      float bias[kEights][4][2] = {};
      if (p.bias) read_bias(first_out + n * 8 + lane % 4 * 2, bias);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t packs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float values[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            values[c] = sums[(n + i) * kEights][half * 2 + c] + bias[0][i][c];
            if constexpr (kGated)
              values[c] = gated(values[c], sums[(n + i) * kEights + 1][half * 2 + c] + bias[kEights - 1][i][c]);
          }
          packs[i] = pack(values[0], values[1]);
        }
        transpose(packs);
        put(first_row + warp * 16 + half * 8 + lane / 4, first_out + (n + lane % 4) * 8, packs);
      }
    }
  }
  __device__ void read_bias(int64_t out, float (&bias)[kGated ? 2 : 1][4][2]) const {
    const LinearRowsParams& p = w_.p;
#pragma unroll
    for (int e = 0; e < (kGated ? 2 : 1); ++e)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (const int64_t at = out + i * 8 + c; at < p.out)
            bias[e][i][c] = to_float(static_cast<const T*>(p.bias)[e * p.out + at]);
  }
  __device__ void put(int64_t row, int64_t out, const uint32_t (&packs)[4]) const {
    const LinearRowsParams& p = w_.p;
    if (row >= p.rows || out >= p.out) return;
    T* const y = static_cast<T*>(p.y) + row * p.y_stride + out;
    if (w_.wide && out + 8 <= p.out) {
      *reinterpret_cast<uint4*>(y) = make_uint4(packs[0], packs[1], packs[2], packs[3]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (out + i < p.out) {
        const auto bits = static_cast<uint16_t>(packs[i / 2] >> i % 2 * 16);
        reinterpret_cast<uint16_t*>(y)[i] = bits;
      }
  }
  __device__ static uint32_t pack(float a, float b) {
    const T low = from_float<T>(a), high = from_float<T>(b);
    return uint32_t{reinterpret_cast<const uint16_t&>(low)} | uint32_t{reinterpret_cast<const uint16_t&>(high)} << 16;
  }
  // Lane i of four gets what each of them had at [i].
  __device__ static void transpose(uint32_t (&x)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t a = __shfl_xor_sync(kFullMask, odd ? x[0] : x[1], 1), b = __shfl_xor_sync(kFullMask, odd ? x[2] : x[3], 1);
    (odd ? x[0] : x[1]) = a, (odd ? x[2] : x[3]) = b;
    a = __shfl_xor_sync(kFullMask, high ? x[0] : x[2], 2), b = __shfl_xor_sync(kFullMask, high ? x[1] : x[3], 2);
    (high ? x[0] : x[2]) = a, (high ? x[1] : x[3]) = b;
  }

  static constexpr uint16_t kBoth = 0b11;

  const ManyRows& w_;
  Barriers& barriers_;
  unsigned char* const ring_;
  const int part_;
};

template <class T, int kGroups, int kColumns, bool kGated>
__global__ void __launch_bounds__((kGroups + 1) * kWarpgroup, 1) many_rows_kernel(const __grid_constant__ ManyRows w) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Kernel = ManyRowsKernel<T, kGroups, kColumns, kGated>;
  extern __shared__ __align__(1024) unsigned char ring[];
  __shared__ typename Kernel::Barriers barriers;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&w.weight));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&w.x));
    for (int i = 0; i < Kernel::kStages; ++i) {
      barriers.full[i].init(1);
      barriers.empty[i].init(kPair * kGroups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  Cluster::sync();  // the other block may now reach this one's shared memory
  Kernel kernel(w, barriers, ring);
  if (threadIdx.x < kGroups * kWarpgroup)
    kernel.multiply();
  else if (threadIdx.x == kGroups * kWarpgroup)
    kernel.copy();
  __syncwarp();
  Cluster::sync();  // nothing is on its way to a block that has left
#endif
}

template <class T, int kGroups, int kColumns, bool kGated>
void start(const LinearRowsParams& p, Stream stream) {
  using Kernel = ManyRowsKernel<T, kGroups, kColumns, kGated>;
  const auto kernel = many_rows_kernel<T, kGroups, kColumns, kGated>;
  constexpr int kBytes = Kernel::kStages * Kernel::kStageBytes;
  SD_CUDA_CHECK("linear_rows", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const auto part = [](int x) { return static_cast<cuuint32_t>(x); };
  const auto parts = [](int64_t whole, int part) { return static_cast<int>((whole + part - 1) / part); };

  const int row_tiles = parts(p.rows, Kernel::kRows), column_tiles = parts(kGated ? 2 * p.out : p.out, kColumns);
  const bool share_weight = row_tiles % kPair == 0;
  const int weight_box = share_weight ? kColumns / kPair : kColumns,
            x_box = share_weight ? Kernel::kRows : Kernel::kRows / kPair;
  ManyRows w{.p = p, .share_weight = share_weight};
  const int64_t row = p.weight_stride * 2;
  if constexpr (kGated)  // eight rows of the gate and eight of what is gated in turn
    w.weight = tensor_map<4>("linear_rows", p.weight, p.dtype, {size(p.in), 8, 2, size(p.out / 8)},
                             {size(row), size(row * p.out), size(row * 8)}, {kSlice, 8, 2, part(weight_box / 16)});
  else
    w.weight = tensor_map<2>("linear_rows", p.weight, p.dtype, {size(p.in), size(p.out)},
                             {size(p.out > 1 ? row : p.in * 2)}, {kSlice, part(weight_box)});
  w.x = tensor_map<2>("linear_rows", p.x, p.dtype, {size(p.in), size(p.rows)}, {size(p.x_stride * 2)},
                      {kSlice, part(x_box)});
  w.row_pairs = share_weight ? row_tiles / kPair : row_tiles;
  w.pairs = w.row_pairs * (share_weight ? column_tiles : parts(column_tiles, kPair));
  w.slices = static_cast<int>(p.in / kSlice);
  w.wide = (reinterpret_cast<uintptr_t>(p.y) | static_cast<uintptr_t>(p.y_stride * 2)) % 16 == 0;
  const int clusters = std::min(w.pairs, current_device("linear_rows").multiprocessors / kPair);
  launch("linear_rows", kernel,
         {.grid = static_cast<unsigned>(clusters * kPair),
          .threads = static_cast<unsigned>((kGroups + 1) * kWarpgroup),
          .shared_bytes = kBytes,
          .cluster = kPair},
         stream, w);
}

// What the multiprocessors would compute, those that idle in the last turn included, with such tiles.
int64_t cost(const LinearRowsParams& p, int rows, int columns, int multiprocessors) {
  const auto parts = [](int64_t whole, int64_t part) { return (whole + part - 1) / part; };
  const int64_t row_tiles = parts(p.rows, rows), column_tiles = parts(p.gated ? 2 * p.out : p.out, columns);
  const int64_t pairs =
      row_tiles % kPair == 0 ? row_tiles / kPair * column_tiles : row_tiles * parts(column_tiles, kPair);
  return parts(pairs, multiprocessors / kPair) * rows * columns;
}

}  // namespace

void wgmma_many_rows(const LinearRowsParams& p, Stream stream) {
  const int processors = current_device("linear_rows").multiprocessors;
  const auto of_type = [&]<class T, bool kGated>() {
    if (cost(p, 192, 192, processors) < cost(p, 128, 256, processors))
      start<T, 3, 192, kGated>(p, stream);
    else
      start<T, 2, 256, kGated>(p, stream);
  };
  if (p.dtype == kBFloat16)
    p.gated ? of_type.template operator()<BFloat16, true>() : of_type.template operator()<BFloat16, false>();
  else
    p.gated ? of_type.template operator()<Half, true>() : of_type.template operator()<Half, false>();
}

}  // namespace specdec
