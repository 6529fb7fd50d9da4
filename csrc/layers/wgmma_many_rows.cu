// linear_rows of more than 128 rows on Hopper: wgmma, with rows of x as its rows and rows of the weight as its columns.
//
// Grid: two blocks, a cluster, for each two multiprocessors, which take pairs of tiles in turn. A tile is 256 or 192
// rows of x, whichever leaves fewer multiprocessors idle in the last turn, by 192 of the weight: as many sums as
// registers hold, since what a product costs beside the arithmetic is what is copied for it. Two or three warpgroups
// multiply; a warp copies slices of 64 numbers of each row of the weight into a ring (TMA), another those of x, so far
// ahead that the next tile's are there when a tile is written. The tiles of a pair stand beside each other: each block
// copies half of the rows of x, to both. All pairs of the same columns follow each other, so that the weight comes from
// memory once.
//
// Arithmetic is the floor, at the clock that power allows: 2048 rows by the gate and up of an 8B model take 523 us
// there with nothing copied or written. The gate is taken here as in wgmma_linear_rows, its two sums being one
// thread's.
#include <algorithm>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/tensor_map.h"
#include "core/wgmma.cuh"
#include "layers/gate_rows.h"
#include "layers/linear_rows.h"
#include "layers/product_ring.cuh"

namespace specdec {
namespace {

constexpr int kPanelRows = 64, kColumns = 192;
constexpr int kPair = 2;  // blocks of a cluster

struct ManyRows {
  CUtensorMap weight, x;
  LinearRowsParams p;
  int row_tiles, pairs, slices;
  bool wide;  // y is written 16 bytes at a time
};

struct Tile {
  int row, column;  // of x, and of the weight
};

// A block's part, with kGroups warpgroups that multiply kPanels times 64 rows each.
template <class T, int kGroups, int kPanels, bool kGated>
class ManyRowsKernel {
 public:
  static constexpr int kEights = kGated ? 2 : 1;  // of columns, that make eight numbers of y
  static constexpr int kRows = kGroups * kPanels * kPanelRows;
  static constexpr int kXBytes = kRows * 128, kStageBytes = kXBytes + kColumns * 128;
  static constexpr int kStages = kRingBytes / kStageBytes;
  using Barriers = RingBarriers<kStages>;

  __device__ ManyRowsKernel(const ManyRows& w, Barriers& barriers, unsigned char* ring)
      : w_(w), barriers_(barriers), ring_(ring), part_(static_cast<int>(Cluster::rank())) {}

  // By a thread. What fits is on its way before x is there.
  __device__ void copy_weight() {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    for_each_stage([&](int at, const Tile& tile, int k) {
      uint64_t* const full = &barriers_.full[at].state;
      cute::set_barrier_transaction_bytes(*full, kStageBytes);
      if constexpr (kGated)
        cute::SM90_TMA_LOAD_4D::copy(&w_.weight, full, kHint, weight_of(at), k, 0, 0, tile.column / 16);
      else
        cute::SM90_TMA_LOAD_2D::copy(&w_.weight, full, kHint, weight_of(at), k, tile.column);
    });
  }

  // By another, for both blocks.
  __device__ void copy_x() {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
    constexpr uint16_t kBoth = 0b11;
    wait_for_kernels_before();
    for_each_stage([&](int at, const Tile& tile, int k) {
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&w_.x, &barriers_.full[at].state, kBoth, kHint,
                                             x_of(at) + part_ * kXBytes / kPair, k, tile.row + part_ * kRows / kPair);
    });
  }

  // By each warpgroup, for its rows of each tile.
  __device__ void multiply() {
    const int first = static_cast<int>(threadIdx.x) / kWarpgroup * kPanels * kPanelRows;
    wait_for_kernels_before();  // of whom one may still write to `out`
    Sums sums[kPanels];
    Turn<kStages> turn;
    for_each_tile([&](const Tile& tile) {
      int before = -1;
      for (int slice = 0; slice < w_.slices; ++slice) {
        barriers_.full[turn.at].wait(turn.parity);
        pin_all(sums);
        cute::warpgroup_arrive();
        const uint64_t x = wgmma_operand(x_of(turn.at) + first * 128, 0);
        const uint64_t weight = wgmma_operand(weight_of(turn.at), 0);
#pragma unroll
        for (int k = 0; k < kSlice / 16; ++k)
#pragma unroll
          for (int i = 0; i < kPanels; ++i)
            Multiply::multiply(x + (i * kPanelRows * 128 >> 4) + 2 * k, weight + 2 * k, slice > 0 || k > 0, sums[i]);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<1>();
        if (before >= 0) release(before);
        before = turn.at;
        turn.advance();
      }
      cute::warpgroup_wait<0>();
      pin_all(sums);
      release(before);
#pragma unroll
      for (int i = 0; i < kPanels; ++i) {
        if (w_.p.bias) add_bias(tile.column, sums[i]);
        const Tile mine{.row = tile.row + first + i * kPanelRows, .column = tile.column};
        w_.wide ? write<true>(mine, sums[i]) : write<false>(mine, sums[i]);
      }
    });
  }

 private:
  using Multiply = Wgmma<T, kColumns, cute::SM90::GMMA::Major::K>;
  // A thread's: of rows lane / 4 and lane / 4 + 8 of its warp's 16, and of columns 2 (lane % 4) and the next of every
  // eight. Of gated columns eight are gates and the next eight what is gated.
  using Sums = float[kColumns / 8][4];

  template <class F>
  __device__ void for_each_tile(F f) const {
    for (int pair = static_cast<int>(blockIdx.x) / kPair; pair < w_.pairs; pair += static_cast<int>(gridDim.x) / kPair)
      f(Tile{.row = pair % w_.row_tiles * kRows, .column = (pair / w_.row_tiles * kPair + part_) * kColumns});
  }
  // In turn, when both blocks have read what was in the stage before.
  template <class F>
  __device__ void for_each_stage(F f) const {
    Turn<kStages> turn;
    for_each_tile([&](const Tile& tile) {
      for (int slice = 0; slice < w_.slices; ++slice, turn.advance()) {
        barriers_.empty[turn.at].wait(turn.parity ^ 1);
        f(turn.at, tile, slice * kSlice);
      }
    });
  }

  __device__ unsigned char* x_of(int stage) const { return ring_ + stage * kStageBytes; }
  __device__ unsigned char* weight_of(int stage) const { return x_of(stage) + kXBytes; }

  // By a thread for each block of the pair: wgmma has read what it has for the whole warpgroup. (What releases to the
  // whole cluster would wait for all writes of the thread, which takes longer than a slice.)
  __device__ void release(int stage) const {
    const unsigned block = threadIdx.x % kWarpgroup;
    if (block >= kPair) return;
    asm volatile(
        "mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(Cluster::address_at(&barriers_.empty[stage].state, block))
        : "memory");
  }

  __device__ void add_bias(int column, Sums& sums) const {
    const int64_t first = column / kEights + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (const int64_t out = first + n / kEights * 8 + c; out < w_.p.out) {
          const float bias = to_float(static_cast<const T*>(w_.p.bias)[n % kEights * w_.p.out + out]);
          sums[n][c] += bias, sums[n][2 + c] += bias;
        }
  }

  // The four lanes of a row exchange what they have of four times eight numbers, so that each writes eight neighbours.
  template <bool kWide>
  __device__ void write(const Tile& tile, const Sums& sums) const {
    const LinearRowsParams& p = w_.p;
    const int warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp;
    const int64_t row = tile.row + warp * 16 + lane / 4, out = tile.column / kEights + lane % 4 * 8;
    T* const y = static_cast<T*>(p.y) + row * p.y_stride + out;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kColumns / kEights; n += 32) {
        uint32_t packs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) packs[i] = pack(&sums[(n / 8 + i) * kEights], half * 2);
        transpose(packs);
        if (row + half * 8 < p.rows && out + n < p.out)
          put<kWide>(y + half * 8 * p.y_stride + n, p.out - out - n, packs);
      }
  }
  __device__ static uint32_t pack(const float (*sums)[4], int at) {
    float values[2];
#pragma unroll
    for (int c = 0; c < 2; ++c)
      values[c] = kGated ? gated(sums[0][at + c], sums[kEights - 1][at + c]) : sums[0][at + c];
    const T low = from_float<T>(values[0]), high = from_float<T>(values[1]);
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
  template <bool kWide>
  __device__ static void put(T* y, int64_t count, const uint32_t (&packs)[4]) {
    if constexpr (kWide) {
      __stwb(reinterpret_cast<uint4*>(y), make_uint4(packs[0], packs[1], packs[2], packs[3]));
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (i < count) reinterpret_cast<uint16_t*>(y)[i] = static_cast<uint16_t>(packs[i / 2] >> i % 2 * 16);
    }
  }

  __device__ static void pin_all(Sums (&sums)[kPanels]) {
#pragma unroll
    for (auto& of_panel : sums) pin(of_panel);
  }

  const ManyRows& w_;
  Barriers& barriers_;
  unsigned char* const ring_;
  const int part_;
};

template <class T, int kGroups, int kPanels, bool kGated>
__global__ void __launch_bounds__((kGroups + 1) * kWarpgroup, 1) many_rows_kernel(const __grid_constant__ ManyRows w) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Kernel = ManyRowsKernel<T, kGroups, kPanels, kGated>;
  extern __shared__ __align__(1024) unsigned char ring[];
  __shared__ typename Kernel::Barriers barriers;
  begin_ring(w.weight, w.x, barriers, Kernel::kStages, kPair * kGroups);
  Cluster::sync();  // the other block may now reach this one's shared memory
  Kernel kernel(w, barriers, ring);
  // The registers of a multiprocessor belong to those who multiply.
  if (threadIdx.x < kGroups * kWarpgroup) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kGroups == 2 ? 240 : 160));
    kernel.multiply();
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == kGroups * kWarpgroup) kernel.copy_weight();
    if (threadIdx.x == kGroups * kWarpgroup + kWarp) kernel.copy_x();
  }
  __syncwarp();
  Cluster::sync();  // nothing is on its way to a block that has left
#endif
}

int parts(int64_t whole, int64_t part) { return static_cast<int>((whole + part - 1) / part); }

// Rows that a multiprocessor multiplies, with tiles of so many, and those included for which it waits in the last turn.
int64_t turns(int64_t rows, int64_t weight_rows, int tile_rows, int multiprocessors) {
  const int64_t pairs = int64_t{parts(rows, tile_rows)} * parts(weight_rows, kPair * kColumns);
  return int64_t{tile_rows} * parts(pairs, multiprocessors / kPair);
}

template <class T, int kGroups, int kPanels, bool kGated>
void start(const LinearRowsParams& p, int multiprocessors, Stream stream) {
  using Kernel = ManyRowsKernel<T, kGroups, kPanels, kGated>;
  const auto kernel = many_rows_kernel<T, kGroups, kPanels, kGated>;
  constexpr int kBytes = Kernel::kStages * Kernel::kStageBytes;
  SD_CUDA_CHECK("linear_rows", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };

  ManyRows w{.p = p};
  const int64_t row = p.weight_stride * 2;
  if constexpr (kGated)  // eight rows of the gate and eight of what is gated in turn
    w.weight = tensor_map<4>("linear_rows", p.weight, p.dtype, {size(p.in), 8, 2, size(p.out / 8)},
                             {size(row), size(row * p.out), size(row * 8)}, {kSlice, 8, 2, kColumns / 16});
  else
    w.weight = tensor_map<2>("linear_rows", p.weight, p.dtype, {size(p.in), size(p.out)},
                             {size(p.out > 1 ? row : p.in * 2)}, {kSlice, kColumns});
  w.x = tensor_map<2>("linear_rows", p.x, p.dtype, {size(p.in), size(p.rows)}, {size(p.x_stride * 2)},
                      {kSlice, Kernel::kRows / kPair});
  w.row_tiles = parts(p.rows, Kernel::kRows);
  w.pairs = w.row_tiles * parts(Kernel::kEights * p.out, kPair * kColumns);
  w.slices = static_cast<int>(p.in / kSlice);
  w.wide = p.out % 8 == 0 && (reinterpret_cast<uintptr_t>(p.y) | static_cast<uintptr_t>(p.y_stride * 2)) % 16 == 0;
  launch("linear_rows", kernel,
         {.grid = static_cast<unsigned>(std::min(w.pairs, multiprocessors / kPair) * kPair),
          .threads = static_cast<unsigned>((kGroups + 1) * kWarpgroup),
          .shared_bytes = kBytes,
          .cluster = kPair},
         stream, w);
}

}  // namespace

void wgmma_many_rows(const LinearRowsParams& p, Stream stream) {
  const int processors = current_device("linear_rows").multiprocessors;
  const auto of_type = [&]<class T, bool kGated>() {
    const int64_t weight_rows = kGated ? 2 * p.out : p.out;
    if (turns(p.rows, weight_rows, 192, processors) < turns(p.rows, weight_rows, 256, processors))
      start<T, 3, 1, kGated>(p, processors, stream);
    else
      start<T, 2, 2, kGated>(p, processors, stream);
  };
  if (p.dtype == kBFloat16)
    p.gated ? of_type.template operator()<BFloat16, true>() : of_type.template operator()<BFloat16, false>();
  else
    p.gated ? of_type.template operator()<Half, true>() : of_type.template operator()<Half, false>();
}

bool many_rows_fill(int64_t rows, int64_t weight_rows) {
  const Device device = current_device("linear_rows");
  if (!device.has_wgmma || rows <= kFewLinearRows) return false;
  const int64_t taken = std::min(turns(rows, weight_rows, 192, device.multiprocessors),
                                 turns(rows, weight_rows, 256, device.multiprocessors));
  return rows * weight_rows * 10 >= taken * kColumns * device.multiprocessors * 9;
}

}  // namespace specdec
