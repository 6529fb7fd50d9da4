// small_m_gemm on Hopper: wgmma, with rows of the weight as its 64 rows and rows of x as its columns.
//
// Grid: a block for each multiprocessor. The weight counts most, so all of shared memory is a ring of it on its way in
// (TMA, slices of 64 numbers of each row), with the same slices of x beside it; a warp copies the one and a warp the
// other, and a warpgroup for each of up to four tiles multiplies. A tile has as many rows as make the blocks' shares
// even, 64 at most; wgmma multiplies 64 whatever they are. Where the weight has few rows, so that x would be read as
// often as it, two blocks take half of the length each, and add up. How the length is cut depends on the weight's shape
// alone, so a row's bits do not depend on what stands beside it, or how much.
//
// A round is a chain of such products with small kernels between them, during which the memory would idle; so this
// kernel starts while those still run (programmatic dependent launch), and fills its ring before x is there: none of
// them writes the weight. What they read waits behind all that the ring has asked for, so it asks for no more at a time
// than keeps the memory busy. A gate is taken here for the same reason: a tile is then eight rows of the gate and the
// same eight of what is gated, in turn, which makes the two sums those of one thread.
//
// Numbers of 8 bits are multiplied as such, 128 of them at a time, whose sums the tensor cores keep with 14 bits of
// mantissa or so; these are then scaled, by the group's scales of both sides, and added up in float32. Scales come to
// each stage beside what they scale. Numbers of 4 bits become 16-bit ones in registers, exactly so, from which wgmma
// takes its rows as well, and their sums are scaled likewise: the weight's order (nibble_of) is such that what a thread
// has of a step lies together.
#include <algorithm>
#include <climits>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/cluster.cuh"
#include "core/mbarrier.cuh"
#include "core/tensor_map.h"
#include "core/wgmma.cuh"
#include "layers/activation/silu_and_mul.h"
#include "layers/gemm/small_m_gemm.h"

namespace specdec::layers {
namespace {

constexpr int kTile = 64;     // rows of the weight that a warpgroup multiplies, of which a tile may fill the first ones
constexpr int kMaxTiles = 4;  // in a stage, a warpgroup for each
constexpr int kMaxDepth = 4, kMaxStages = 24;
constexpr int kMaxColumns = 128;       // rows of x that a kernel takes
constexpr int kMaxNibbleColumns = 32;  // the same of 4 bits
constexpr int kMaxScaledColumns = 64;  // the same of 8 bits, whose products are added up in registers of their own
constexpr int kSliceBytes = 128;       // of a row, that lie together: a row of a swizzled panel
constexpr int kWarpgroup = 4 * kWarp;
constexpr int kRingBytes = 226 * 1024;
constexpr int kBytesUnderWay = 36 * 1000;  // of the weight, to a multiprocessor: what bandwidth and latency make

// Barriers of each stage: `full` opens when the stage's part of the weight has arrived, `x_full` when that of x has,
// `empty` when all its readers are done.
template <int kStages>
struct RingBarriers {
  Mbarrier full[kStages], x_full[kStages], empty[kStages];

  __device__ void wait_for_both(const Turn<kStages>& turn) {
    full[turn.at].wait(turn.parity);
    x_full[turn.at].wait(turn.parity);
  }
};

// Every kernel begins with this. Other threads see the barriers after the next barrier of the block or its cluster.
// The next kernel may start at once, and wait for this one with its ring full of its own weight.
template <int kStages>
__device__ __forceinline__ void begin_ring(const CUtensorMap& weight, const CUtensorMap& x,
                                           RingBarriers<kStages>& barriers, int stages, unsigned readers) {
  let_next_kernel_start();
  if (threadIdx.x > 0) return;
  cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&weight));
  cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&x));
  for (int i = 0; i < stages; ++i) {
    barriers.full[i].init(1);
    barriers.x_full[i].init(1);
    barriers.empty[i].init(readers);
  }
  Cluster::show_barriers();
}

struct Nibbles {
  uint8_t both;
};

struct WgmmaSmallMGemm {
  CUtensorMap weight, x;
  CUtensorMap weight_scales, x_scales;  // of 8 bits, and the first of 4
  SmallMGemmParams p;
  int split;          // blocks that share the length, a cluster
  int tile_rows;      // a multiple of 8, so that panels start on 1024 bytes; of 16 if they are gated
  int tiles_at_once;  // of a stage
  int groups;         // of so many tiles, of a block
  int depth;          // slices of a stage
  int stages, stage_bytes;
  int stages_under_way;  // at most, whose part of the weight has not arrived
  int scales;            // groups that a stage has scales of: those of its slices, 1 of whole rows, or 0

  __device__ int rows_at_once() const { return tiles_at_once * tile_rows; }
  __device__ int slice_bytes() const { return rows_at_once() * kSliceBytes; }
};

// Where scales stand behind the slices of a stage: those of the weight, and then of x, each from 128 bytes on.
SD_HD constexpr int scales_bytes(int scales, int rows) { return (scales * rows * 4 + 127) / 128 * 128; }

// The part of the work that is this block's: so many tiles from the first on, which may lie behind the last there is;
// and of the length, slices from first_slice on.
struct Share {
  int part, first, first_slice, slices;

  __device__ Share(const WgmmaSmallMGemm& w, int slice) {
    part = static_cast<int>(Cluster::rank());
    first = static_cast<int>(blockIdx.x) / w.split * w.groups * w.tiles_at_once;
    slices = static_cast<int>(w.p.in / slice) / w.split;
    first_slice = slices * part;
  }
};

// Of a weight of these numbers.
template <class W>
struct SliceOf {
  static constexpr bool kIsNibbles = std::is_same_v<W, Nibbles>, kHasScaledX = std::is_same_v<W, Float8>;
  static constexpr bool kScaled = kIsNibbles || kHasScaledX;
  static constexpr int kNumbers = kIsNibbles ? 2 * kSliceBytes : kSliceBytes / static_cast<int>(sizeof(W));
  static constexpr int kXPanels = kIsNibbles ? 4 : 1;  // of 128 bytes of each row of x
  static constexpr int kGroups = kIsNibbles ? 2 : 1;   // that have scales of their own
};

// W: of the weight; T: of y, and of x unless W is Float8.
template <class T, class W, int kColumns>
class SmallMGemm : SliceOf<W> {
  using Slice = SliceOf<W>;
  using Slice::kGroups, Slice::kHasScaledX, Slice::kIsNibbles, Slice::kScaled, Slice::kXPanels;
  using X = std::conditional_t<kHasScaledX, Float8, T>;

 public:
  static constexpr int kPanelBytes = kColumns * kSliceBytes, kXBytes = kPanelBytes * kXPanels;
  static constexpr unsigned kReaders = kScaled ? 4 : 1;  // of a warpgroup, that say what is read: scales, each warp
  using Barriers = RingBarriers<kMaxStages>;

  __device__ SmallMGemm(const WgmmaSmallMGemm& w, Barriers& barriers, unsigned char* ring)
      : w_(w), share_(w, Slice::kNumbers), barriers_(barriers), ring_(ring) {}

  // By a thread. What fits is on its way before x is there.
  __device__ void copy_weight() {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
    const int rows = w_.rows_at_once();
    const int bytes = w_.depth * w_.slice_bytes() + w_.scales * rows * 4;
    Turn<kMaxStages> turn, arriving;
    int under_way = 0;
    int row = share_.first * w_.tile_rows;
    for (int group = 0; group < w_.groups; ++group, row += rows)
      for (int slice = 0; slice < share_.slices; slice += w_.depth, turn.advance(w_.stages)) {
        barriers_.empty[turn.at].wait(turn.parity ^ 1);
        if (under_way == w_.stages_under_way) {
          barriers_.full[arriving.at].wait(arriving.parity);
          arriving.advance(w_.stages);
        } else {
          ++under_way;
        }
        uint64_t* const full = &barriers_.full[turn.at].state;
        cute::set_barrier_transaction_bytes(*full, bytes);
        void* const to = stage_at(turn.at);
        if (w_.p.gated)
          cute::SM90_TMA_LOAD_5D::copy(&w_.weight, full, kHint, to, 0, 0, 0, row / 16, share_.first_slice + slice);
        else
          cute::SM90_TMA_LOAD_3D::copy(&w_.weight, full, kHint, to, 0, row, share_.first_slice + slice);
        if constexpr (kScaled) {
          void* const scales = weight_scales_of(turn.at);
          if (w_.p.gated)
            cute::SM90_TMA_LOAD_3D::copy(&w_.weight_scales, full, kHint, scales, row / 2, 0, group_of(slice));
          else
            cute::SM90_TMA_LOAD_2D::copy(&w_.weight_scales, full, kHint, scales, row, group_of(slice));
        }
      }
  }

  // By another.
  __device__ void copy_x() {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
    constexpr int kScaleBytes = kHasScaledX ? kColumns * 4 : 0;
    wait_for_kernels_before();
    Turn<kMaxStages> turn;
    for (int group = 0; group < w_.groups; ++group)
      for (int slice = 0; slice < share_.slices; slice += w_.depth, turn.advance(w_.stages)) {
        barriers_.empty[turn.at].wait(turn.parity ^ 1);
        uint64_t* const full = &barriers_.x_full[turn.at].state;
        cute::set_barrier_transaction_bytes(*full, w_.depth * kXBytes + w_.scales * kScaleBytes);
        cute::SM90_TMA_LOAD_3D::copy(&w_.x, full, kHint, x_of(turn.at), 0, 0, (share_.first_slice + slice) * kXPanels);
        if constexpr (kHasScaledX)
          cute::SM90_TMA_LOAD_2D::copy(&w_.x_scales, full, kHint, x_scales_of(turn.at), 0, group_of(slice));
      }
  }

  // By each warpgroup, for its tile of each group.
  __device__ void multiply() {
    const int mine = threadIdx.x / kWarpgroup;
    Sums sums = {};
    Turn<kMaxStages> turn;
    wait_for_kernels_before();  // of whom one may still write to `out`
    for (int group = 0; group < w_.groups; ++group) {
      const int tile = share_.first + group * w_.tiles_at_once + mine;
      if constexpr (kScaled) {
        multiply_scaled(mine, turn, sums);
        w_.split > 1 ? add_up_and_write(tile, sums) : write(tile, sums);
        continue;
      }
      int before = -1;
      for (int slice = 0; slice < share_.slices; slice += w_.depth) {
        barriers_.wait_for_both(turn);
        pin(sums);
        cute::warpgroup_arrive();
        uint64_t weight = wgmma_operand(stage_at(turn.at) + mine * w_.tile_rows * kSliceBytes, 0);
        uint64_t x = wgmma_operand(x_of(turn.at), 0);
        for (int i = 0; i < w_.depth; ++i, weight += w_.slice_bytes() >> 4, x += kXBytes >> 4)
#pragma unroll
          for (int k = 0; k < kSteps; ++k)
            Multiply::multiply(weight + 2 * k, x + 2 * k, slice > 0 || i > 0 || k > 0, sums);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<1>();
        if (before >= 0) release(before);
        before = turn.at;
        turn.advance(w_.stages);
      }
      cute::warpgroup_wait<0>();
      pin(sums);
      if (before >= 0) release(before);
      w_.split > 1 ? add_up_and_write(tile, sums) : write(tile, sums);
    }
  }

 private:
  using Multiply = Wgmma<X, kColumns, cute::SM90::GMMA::Major::K>;
  using Sums = float[kColumns / 8][4];
  static constexpr int kSteps = kSliceBytes / 32;  // of a panel

  // A stage: its slices of the tiles, then those of x, then scales. Behind the stages is what another block of the
  // cluster leaves.
  __device__ unsigned char* stage_at(int stage) const { return ring_ + stage * w_.stage_bytes; }
  __device__ unsigned char* x_of(int stage) const { return stage_at(stage) + w_.depth * w_.slice_bytes(); }
  __device__ float* weight_scales_of(int stage) const {
    return reinterpret_cast<float*>(x_of(stage) + w_.depth * kXBytes);
  }
  __device__ float* x_scales_of(int stage) const {
    return weight_scales_of(stage) + scales_bytes(w_.scales, w_.rows_at_once()) / 4;
  }
  // The first group whose scales a stage has.
  __device__ int group_of(int slice) const { return w_.p.groups > 1 ? (share_.first_slice + slice) * kGroups : 0; }
  __device__ float2* left() const { return reinterpret_cast<float2*>(stage_at(w_.stages)); }

  // By one thread: wgmma has read what it has for the whole warpgroup. Scales each warp reads for itself.
  __device__ void release(int stage) {
    if constexpr (kScaled) __syncwarp();
    if (threadIdx.x % (kWarpgroup / kReaders) == 0) barriers_.empty[stage].arrive();
  }

  // Two numbers of 4 bits of a word, the i-th of four pairs, less what stands for 0. In 16 bits the last four of a
  // mantissa are units where the exponent makes the number 128 (bfloat16) or 1024 (float16) and more.
  static __device__ constexpr uint32_t units() { return std::is_same_v<T, BFloat16> ? 0x43004300 : 0x64006400; }
  static __device__ uint32_t minus_zero(uint32_t zero) { return (units() | 0x80008000) | zero | zero << 16; }
  static __device__ uint32_t widened(uint32_t word, int i, uint32_t minus) {
    const uint32_t numbers = (word >> 4 * i & 0x000f000f) | units();
    uint32_t out;
    if constexpr (std::is_same_v<T, BFloat16>)
      asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(numbers), "r"(minus));
    else
      asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(numbers), "r"(minus));
    return out;
  }

  // A thread's place among the rows of a block, and among the scales of a stage: of its two rows.
  struct RowPlace {
    int row, low, high;
  };
  // Groups of numbers of the tiles, one after the other.
  struct GroupTurn {
    Turn<kMaxStages> stage;
    int group = 0;  // of the stage's
  };
  using Widened = uint32_t[kIsNibbles ? 2 * kSteps : 1][4];

  __device__ float2 weight_scales(const GroupTurn& at, const RowPlace& place) const {
    const float* const of_group = weight_scales_of(at.stage.at) + (w_.scales > 1 ? at.group : 0) * w_.rows_at_once();
    return {of_group[place.low], of_group[place.high]};
  }

  // Starts to multiply the next group, of a stage that may have to arrive.
  __device__ void start_group(GroupTurn& next, const RowPlace& place, Widened& rows, Sums& part) {
    if (next.group == 0) barriers_.wait_for_both(next.stage);
    const int i = next.group / kGroups, half = next.group % kGroups;
    const unsigned char* const slice = stage_at(next.stage.at) + i * w_.slice_bytes();
    const uint64_t x = wgmma_operand(x_of(next.stage.at), 0) + (i * kXBytes >> 4);
    if constexpr (kIsNibbles) {
      // As the copy engine swizzles: eights of rows have their 16 bytes in orders of their own.
      const int lane = threadIdx.x % kWarp;
      const unsigned char* const from = slice + place.row * kSliceBytes + ((half * 4 + lane % 4) ^ lane / 4) * 16;
      const uint4 top = *reinterpret_cast<const uint4*>(from);
      const uint4 bottom = *reinterpret_cast<const uint4*>(from + 8 * kSliceBytes);
      const uint32_t of_top[] = {top.x, top.y, top.z, top.w}, of_bottom[] = {bottom.x, bottom.y, bottom.z, bottom.w};
      const float2 scales = weight_scales(next, place);
      const uint32_t less_top = minus_zero(FourBitScale(scales.x).zero);
      const uint32_t less_bottom = minus_zero(FourBitScale(scales.y).zero);
#pragma unroll
      for (int k = 0; k < 2 * kSteps; ++k)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          rows[k][2 * e] = widened(of_top[k / 2], k % 2 * 2 + e, less_top);
          rows[k][2 * e + 1] = widened(of_bottom[k / 2], k % 2 * 2 + e, less_bottom);
        }
    }
    pin(part);
    cute::warpgroup_arrive();
    if constexpr (kIsNibbles) {
#pragma unroll
      for (int k = 0; k < 2 * kSteps; ++k)
        Multiply::multiply(rows[k], x + ((half * 2 + k / kSteps) * kPanelBytes >> 4) + 2 * (k % kSteps), k > 0, part);
    } else {
      const uint64_t weight = wgmma_operand(slice + threadIdx.x / kWarpgroup * w_.tile_rows * kSliceBytes, 0);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) Multiply::multiply(weight + 2 * k, x + 2 * k, k > 0, part);
    }
    cute::warpgroup_commit_batch();
    advance(next);
  }

  // Adds to the sums what was multiplied of the next group that was not, kInFlight of them behind it still under way.
  template <int kInFlight>
  __device__ void add_group(GroupTurn& next, const RowPlace& place, Sums& part, Sums& sums) {
    float2 scales = weight_scales(next, place);
    if constexpr (kIsNibbles) scales = {FourBitScale(scales.x).scale, FourBitScale(scales.y).scale};
    float2 of_columns[kHasScaledX ? kColumns / 8 : 1];
    const auto read_x_scales = [&] {
      const float* const of_x = x_scales_of(next.stage.at) + (w_.scales > 1 ? next.group : 0) * kColumns;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
        of_columns[n] = *reinterpret_cast<const float2*>(of_x + n * 8 + threadIdx.x % 4 * 2);
    };
    if constexpr (kHasScaledX && kColumns <= 32) read_x_scales();
    cute::warpgroup_wait<kInFlight>();
    pin(part);
    if constexpr (kHasScaledX && kColumns > 32) read_x_scales();  // for which there are no registers before
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float2 of_x = kHasScaledX ? of_columns[kHasScaledX ? n : 0] : float2{1, 1};
      sums[n][0] += part[n][0] * (of_x.x * scales.x);
      sums[n][1] += part[n][1] * (of_x.y * scales.x);
      sums[n][2] += part[n][2] * (of_x.x * scales.y);
      sums[n][3] += part[n][3] * (of_x.y * scales.y);
    }
    const int stage = next.stage.at;
    if (advance(next)) release(stage);
  }
  // Whether this was the last of a stage.
  __device__ bool advance(GroupTurn& next) const {
    if (++next.group < w_.depth * kGroups) return false;
    next.group = 0;
    next.stage.advance(w_.stages);
    return true;
  }

  // A group of tiles of a weight with scales. Of few columns one group of numbers is multiplied while the one before it
  // is scaled and the one behind it widened.
  __device__ void multiply_scaled(int mine, Turn<kMaxStages>& turn, Sums& sums) {
#pragma unroll
    for (auto& of_columns : sums)
#pragma unroll
      for (float& sum : of_columns) sum = 0;
    const int thread = threadIdx.x % kWarpgroup, warp = thread / kWarp, lane = thread % kWarp;
    const int row = mine * w_.tile_rows + warp * 16 + lane / 4;
    const int gate = mine * w_.tile_rows / 2 + warp * 8 + lane / 4;
    const RowPlace place = w_.p.gated ? RowPlace{row, gate, gate + w_.rows_at_once() / 2} : RowPlace{row, row, row + 8};
    const int groups = share_.slices * kGroups;
    GroupTurn starting{turn}, adding{turn};
    Widened of_one;
    Sums one;
    if constexpr (kColumns <= (kIsNibbles ? 16 : 32)) {
      Widened of_other;
      Sums other;
      start_group(starting, place, of_one, one);
      int group = 1;
      for (; group + 1 < groups; group += 2) {
        start_group(starting, place, of_other, other);
        add_group<1>(adding, place, one, sums);
        start_group(starting, place, of_one, one);
        add_group<1>(adding, place, other, sums);
      }
      if (group < groups) {
        start_group(starting, place, of_other, other);
        add_group<1>(adding, place, one, sums);
        add_group<0>(adding, place, other, sums);
      } else {
        add_group<0>(adding, place, one, sums);
      }
    } else {
      for (int group = 0; group < groups; ++group) {
        start_group(starting, place, of_one, one);
        add_group<0>(adding, place, one, sums);
      }
    }
    turn = adding.stage;
  }

  // Where a thread writes. Its sums are of rows lane / 4 and lane / 4 + 8 of its warp's 16, and of columns 2 (lane % 4)
  // and the next of every eight. All of it is known before, since code that runs once waits for its instructions.
  struct Place {
    T* y;  // of the first column
    int64_t stride;
    int columns;  // from there to the last
    bool gated, has_low, has_high;
    float low_bias, high_bias;

    __device__ void put(int column, float low, float high) const {
      if (column >= columns) return;
      T* const to = y + column * stride;
      low += low_bias, high += high_bias;
      if (gated) low = layers::gated(low, high);
      if (has_low) to[0] = from_float<T>(low);
      if (has_high) to[8] = from_float<T>(high);
    }
  };
  __device__ Place place(int tile, int odd) const {
    const SmallMGemmParams& p = w_.p;
    const int thread = threadIdx.x % kWarpgroup, warp = thread / kWarp, lane = thread % kWarp;
    const int row = warp * 16 + lane / 4, column = lane % 4 * 2 + odd;
    const int64_t first = int64_t{tile} * w_.tile_rows;
    const int64_t out = p.gated ? first / 2 + warp * 8 + lane / 4 : first + row, high = p.gated ? p.out + out : out + 8;
    const bool has_low = row < w_.tile_rows && out < p.out, has_high = row + 8 < w_.tile_rows && out + 8 < p.out;
    const T* const bias = static_cast<const T*>(p.bias);
    return {.y = static_cast<T*>(p.y) + column * p.y_stride + out,
            .stride = p.y_stride,
            .columns = static_cast<int>(p.rows) - column,
            .gated = p.gated,
            .has_low = has_low,
            .has_high = has_high && !p.gated,
            .low_bias = bias && has_low ? to_float(bias[out]) : 0,
            .high_bias = bias && (p.gated ? has_low : has_high) ? to_float(bias[high]) : 0};
  }
  __device__ void write(int tile, const Sums& sums) const {
    const Place to = place(tile, 0);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) to.put(n * 8 + c, sums[n][c], sums[n][2 + c]);
  }
  // Two blocks have the same tiles. One writes the even columns and the other the odd ones, and each gets the other's
  // sums of the columns it writes.
  __device__ void add_up_and_write(int tile, const Sums& sums) const {
    const bool odd = share_.part == 1;
    const int threads = w_.tiles_at_once * kWarpgroup;
    float2* there = Cluster::at(left(), static_cast<unsigned>(1 - share_.part)) + threadIdx.x;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n, there += threads)
      *there = odd ? float2{sums[n][0], sums[n][2]} : float2{sums[n][1], sums[n][3]};
    const Place to = place(tile, share_.part);
    Cluster::sync();
    const float2* here = left() + threadIdx.x;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n, here += threads)
      to.put(n * 8, (odd ? sums[n][1] : sums[n][0]) + here->x, (odd ? sums[n][3] : sums[n][2]) + here->y);
  }

  const WgmmaSmallMGemm& w_;
  const Share share_;
  Barriers& barriers_;
  unsigned char* const ring_;
};

template <class T, class W, int kColumns>
__global__ void __launch_bounds__(kMaxTiles* kWarpgroup + 2 * kWarp, 1)
    wgmma_small_m_gemm_kernel(const __grid_constant__ WgmmaSmallMGemm w) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Kernel = SmallMGemm<T, W, kColumns>;
  extern __shared__ __align__(1024) unsigned char ring[];
  __shared__ typename Kernel::Barriers barriers;
  begin_ring(w.weight, w.x, barriers, w.stages, static_cast<unsigned>(w.tiles_at_once) * Kernel::kReaders);
  __syncthreads();
  if (Cluster::size() > 1) Cluster::arrive();  // the others may now reach this block's shared memory
  Kernel kernel(w, barriers, ring);
  const int warp = static_cast<int>(threadIdx.x) / kWarp - 4 * w.tiles_at_once;  // behind those that multiply
  if (warp == 0) {
    if (threadIdx.x % kWarp == 0) kernel.copy_weight();
    return;
  }
  if (Cluster::size() > 1) Cluster::wait();
  if (warp < 0) return kernel.multiply();
  if (threadIdx.x % kWarp == 0) kernel.copy_x();
#endif
}

cuuint64_t size(int64_t x) { return static_cast<cuuint64_t>(x); }
cuuint32_t part(int x) { return static_cast<cuuint32_t>(x); }

template <class X>
constexpr Dtypes kDtypeOf = std::is_same_v<X, BFloat16> ? kBFloat16
                            : std::is_same_v<X, Half>   ? kFloat16
                                                        : kUInt8;

// Rows as slices, of which a copy takes `depth` of each of `box_rows` rows: panels one after the other.
template <class X>
CUtensorMap rows_map(const void* data, int64_t rows, int64_t width, int64_t stride, int box_rows, int depth) {
  constexpr int kSlice = kSliceBytes / sizeof(X);
  return tensor_map<3>("small_m_gemm", data, kDtypeOf<X>, {kSlice, size(rows), size(width / kSlice)},
                       {size(rows > 1 ? stride : width) * sizeof(X), kSliceBytes},
                       {kSlice, part(box_rows), part(depth)});
}

// The same of the weight of a gate above that of what is gated: eight rows of the one and of the other in turn.
template <class X>
CUtensorMap gated_map(const SmallMGemmParams& p, int64_t width, int box_rows, int depth) {
  constexpr int kSlice = kSliceBytes / sizeof(X);
  const int64_t row = p.weight_stride * sizeof(X);
  return tensor_map<5>("small_m_gemm", p.weight, kDtypeOf<X>, {kSlice, 8, 2, size(p.out / 8), size(width / kSlice)},
                       {size(row), size(row * p.out), size(row * 8), kSliceBytes},
                       {kSlice, 8, 2, part(box_rows / 16), part(depth)});
}

// Scales, of which a copy takes those of `box_rows` rows in `scales` groups.
CUtensorMap scales_map(const float* data, int64_t rows, int64_t groups, int64_t stride, int box_rows, int scales) {
  const int64_t row = groups > 1 ? stride : (rows + 3) / 4 * 4;
  return tensor_map<2>("small_m_gemm", data, kFloat32, {size(rows), size(groups)}, {size(row * 4)},
                       {part(box_rows), part(scales)});
}

// The same of gates and of what they gate: half of them each.
CUtensorMap gated_scales_map(const SmallMGemmParams& p, int box_rows, int scales) {
  const int64_t row = p.groups > 1 ? p.weight_scales_stride : 2 * p.out;
  return tensor_map<3>("small_m_gemm", p.weight_scales, kFloat32, {size(p.out), 2, size(p.groups)},
                       {size(p.out * 4), size(row * 4)}, {part(box_rows / 2), 2, part(scales)});
}

// How a weight is shared out.
struct Cut {
  int split, clusters, tile_rows, tiles_at_once, groups, depth, stages, stage_bytes, stages_under_way, bytes;

  // scale_groups: 0, 1 of whole rows, or those of all slices.
  template <class W>
  Cut(SliceOf<W>, int rows, int64_t width, int columns, int64_t scale_groups, bool gated, int multiprocessors) {
    using Slice = SliceOf<W>;
    const int slices = static_cast<int>(width / Slice::kNumbers);
    const auto parts = [](int whole, int part) { return (whole + part - 1) / part; };
    split = slices % 2 == 0 && parts(rows, multiprocessors / 2) <= kMaxTiles * kTile ? 2 : 1;
    const int share = parts(rows, multiprocessors / split), step = gated ? 16 : 8;
    int least = INT_MAX;  // rows that a block takes
    for (int tiles = 1; tiles <= kMaxTiles; ++tiles) {
      const int of_tiles = parts(share, tiles * kTile), all = of_tiles * tiles;
      if (split > 1 && of_tiles > 1) continue;  // what is added up is one group
      const int taken = all * parts(parts(share, all), step) * step;
      if (taken > least || (taken == least && of_tiles == groups)) continue;
      least = taken, tiles_at_once = tiles, groups = of_tiles, tile_rows = taken / all;
    }
    clusters = parts(rows, least);
    // wgmma reads what is behind a tile of fewer rows as well, wherever it ends.
    const int left = split > 1 ? tiles_at_once * kWarpgroup * columns : 0;
    const int behind = std::max((kTile - tile_rows) * kSliceBytes, left), at_once = tiles_at_once * tile_rows;
    const auto stage_of = [&](int slices_of_it) {
      const int scales = scale_groups > 1 ? slices_of_it * Slice::kGroups : static_cast<int>(scale_groups);
      const int of_x = columns * kSliceBytes * Slice::kXPanels;
      const int all = slices_of_it * (at_once * kSliceBytes + of_x) + scales_bytes(scales, at_once) +
                      scales_bytes(Slice::kHasScaledX ? scales : 0, columns);
      return parts(all, 1024) * 1024;  // where panels start
    };
    // A copy and a barrier for each slice would cost more time than its bytes; but the more stages, the more even is
    // what is on its way, which matters most where x takes little of it.
    const int enough = columns > 32 ? 4 : 6;
    for (depth = 1; depth < kMaxDepth && slices % (2 * depth * split) == 0;) {
      if (enough * stage_of(2 * depth) + behind > kRingBytes) break;
      depth *= 2;
    }
    stage_bytes = stage_of(depth);
    stages = std::min(kMaxStages, (kRingBytes - behind) / stage_bytes);
    stages_under_way = std::min(stages, parts(kBytesUnderWay, depth * at_once * kSliceBytes));
    bytes = stages * stage_bytes + behind;
  }
};

template <class T, class W, int kColumns>
void start(const SmallMGemmParams& p, Stream stream) {
  using Slice = SliceOf<W>;
  using X = std::conditional_t<Slice::kHasScaledX, Float8, T>;
  const auto kernel = wgmma_small_m_gemm_kernel<T, W, kColumns>;
  SD_CUDA_CHECK("small_m_gemm", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes));
  const Cut cut(Slice{}, static_cast<int>(p.gated ? 2 * p.out : p.out), p.in, kColumns, p.groups, p.gated,
                current_device("small_m_gemm").num_sms);
  const int at_once = cut.tiles_at_once * cut.tile_rows;
  const int scales = p.groups > 1 ? cut.depth * Slice::kGroups : static_cast<int>(p.groups);
  const int64_t width = Slice::kIsNibbles ? p.in / 2 : p.in;  // in items of the weight
  CUtensorMap weight_scales{}, x_scales{};
  if constexpr (Slice::kScaled)
    weight_scales = p.gated ? gated_scales_map(p, at_once, scales)
                            : scales_map(p.weight_scales, p.out, p.groups, p.weight_scales_stride, at_once, scales);
  if constexpr (Slice::kHasScaledX)
    x_scales = scales_map(p.x_scales, p.rows, p.groups, p.x_scales_stride, kColumns, scales);
  const WgmmaSmallMGemm w{
      .weight = p.gated ? gated_map<W>(p, width, at_once, cut.depth)
                        : rows_map<W>(p.weight, p.out, width, p.weight_stride, at_once, cut.depth),
      .x = rows_map<X>(p.x, p.rows, p.in, p.x_stride, kColumns, cut.depth * Slice::kXPanels),
      .weight_scales = weight_scales,
      .x_scales = x_scales,
      .p = p,
      .split = cut.split,
      .tile_rows = cut.tile_rows,
      .tiles_at_once = cut.tiles_at_once,
      .groups = cut.groups,
      .depth = cut.depth,
      .stages = cut.stages,
      .stage_bytes = cut.stage_bytes,
      .stages_under_way = cut.stages_under_way,
      .scales = scales,
  };
  launch("small_m_gemm", kernel,
         {.grid = static_cast<unsigned>(cut.clusters * cut.split),
          .threads = static_cast<unsigned>(cut.tiles_at_once * kWarpgroup + 2 * kWarp),
          .shared_bytes = static_cast<size_t>(cut.bytes),
          .cluster = static_cast<unsigned>(cut.split)},
         stream, w);
}

}  // namespace

void wgmma_small_m_gemm(const SmallMGemmParams& all, Stream stream) {
  // By columns of wgmma, kMost at a time.
  const auto start_part = [&]<class T, class W, int kMost>(const SmallMGemmParams& p) {
    if (p.rows <= 8) return start<T, W, 8>(p, stream);
    if (p.rows <= 16) return start<T, W, 16>(p, stream);
    if (kMost == 32 || p.rows <= 32) return start<T, W, 32>(p, stream);
    if constexpr (kMost >= 64)
      if (kMost == 64 || p.rows <= 64) return start<T, W, 64>(p, stream);
    if constexpr (kMost > 64) p.rows <= 96 ? start<T, W, 96>(p, stream) : start<T, W, kMost>(p, stream);
  };
  const auto of_types = [&]<class T, class W, int kMost>() {
    using X = std::conditional_t<SliceOf<W>::kHasScaledX, Float8, T>;
    for (int64_t first = 0; first < all.rows; first += kMost) {
      SmallMGemmParams part = all;
      part.x = static_cast<const X*>(all.x) + first * all.x_stride;
      part.y = static_cast<T*>(all.y) + first * all.y_stride;
      if (all.x_scales) part.x_scales = all.x_scales + first;
      part.rows = std::min<int64_t>(all.rows - first, kMost);
      start_part.template operator()<T, W, kMost>(part);
    }
  };
  const auto of_type = [&]<class T>() {
    if (all.bits == 8) return of_types.template operator()<T, Float8, kMaxScaledColumns>();
    if (all.bits == 4) return of_types.template operator()<T, Nibbles, kMaxNibbleColumns>();
    of_types.template operator()<T, T, kMaxColumns>();
  };
  if (all.dtype == kBFloat16)
    of_type.template operator()<BFloat16>();
  else
    of_type.template operator()<Half>();
}

}  // namespace specdec::layers
