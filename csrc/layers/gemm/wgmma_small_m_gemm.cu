// small-M GEMM on Hopper (wgmma): y = x weight^T, with weight rows as the M of wgmma and rows of x as its N.
//
// Grid: one block per SM. Weight traffic dominates, so nearly all shared memory is a TMA ring of weight slices (128
// bytes of each row of up to four tiles) with the matching slices of x. One warp copies the weight, one warp copies x,
// and one warpgroup per tile multiplies. A tile has at most 64 rows, fewer where that balances the blocks; wgmma always
// multiplies 64. If the weight has few rows, x would be read as often as the weight: then a cluster of two blocks
// splits K in halves and adds the sums (split-K). The split depends only on the weight's shape, so the bits of an
// output row do not depend on the other rows of the batch.
//
// Programmatic dependent launch: a forward pass is a chain of GEMMs with small kernels between them, which would leave
// memory idle. This kernel starts while they still run and fills its ring before x is ready, since none of them writes
// the weight. Reads of those small kernels queue after the ring's requests, so the ring requests no more at a time than
// keeps memory busy. Fusing silu_and_mul avoids another small kernel: a gated tile interleaves eight gate rows with the
// matching eight up rows, so one thread holds both sums.
//
// FP8: 128 elements (one scale group) are multiplied at a time. Tensor cores accumulate FP8 with about 14 mantissa
// bits, so each group's sum is scaled by both sides' scales and added up in float32. Scales travel in the stage of the
// slices that they belong to. INT4: weights are dequantized exactly to 16 bits in registers and used as the A operand
// of wgmma; sums are scaled the same way. The weight is interleaved (int4_place) so that a thread's elements of a step
// are contiguous.
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

constexpr int kTile = 64;     // weight rows per warpgroup; a tile may use only the first of them
constexpr int kMaxTiles = 4;  // per stage, one warpgroup each
constexpr int kMaxDepth = 4, kMaxStages = 24;
constexpr int kMaxColumns = 128;       // rows of x per launch, 16-bit weight
constexpr int kMaxInt4Columns = 32;    // INT4 weight
constexpr int kMaxScaledColumns = 64;  // FP8 weight, whose group sums need registers of their own
constexpr int kSliceBytes = 128;       // of a row: the row of a swizzled panel
constexpr int kWarpgroup = 4 * kWarp;
constexpr int kRingBytes = 226 * 1024;
constexpr int kBytesInFlight = 36 * 1000;  // of the weight, per SM: bandwidth times latency

// mbarriers of each stage: `full` completes when the stage's weight has arrived, `x_full` when its x has, `empty` when
// all readers are done.
template <int kStages>
struct RingBarriers {
  Mbarrier full[kStages], x_full[kStages], empty[kStages];

  __device__ void wait_for_both(const Turn<kStages>& turn) {
    full[turn.at].wait(turn.parity);
    x_full[turn.at].wait(turn.parity);
  }
};

// Initialize the barriers; the first statement of the kernel. Other threads see them after the next barrier of the
// block or cluster. The next kernel may start at once and fill its own ring while it waits for this one.
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
  Cluster::fence_barrier_init();
}

struct Int4x2 {
  uint8_t both;
};

struct WgmmaSmallMGemm {
  CUtensorMap weight, x;
  CUtensorMap weight_scales, x_scales;  // FP8: both; INT4: weight_scales
  SmallMGemmParams p;
  int split;      // blocks (a cluster) that split K
  int tile_rows;  // a multiple of 8, so that panels start on 1024 bytes; of 16 if gated
  int tiles_per_stage;
  int groups;  // of tiles_per_stage tiles, per block
  int depth;   // slices per stage
  int stages, stage_bytes;
  int max_stages_in_flight;  // stages whose weight has been requested but has not arrived
  int scales;                // scale groups per stage: those of its slices, 1 for per-row scales, or 0

  __device__ int rows_per_stage() const { return tiles_per_stage * tile_rows; }
  __device__ int slice_bytes() const { return rows_per_stage() * kSliceBytes; }
};

// Return the bytes of a stage's scales, which follow its slices: those of the weight, then those of x, each aligned to
// 128 bytes.
SD_HD constexpr int scales_bytes(int scales, int rows) { return (scales * rows * 4 + 127) / 128 * 128; }

// This block's tiles, from `first` on (they may exceed the grid), and its K slices, from `first_slice` on.
struct BlockWork {
  int part, first, first_slice, slices;

  __device__ BlockWork(const WgmmaSmallMGemm& w, int slice) {
    part = static_cast<int>(Cluster::rank());
    first = static_cast<int>(blockIdx.x) / w.split * w.groups * w.tiles_per_stage;
    slices = static_cast<int>(w.p.in / slice) / w.split;
    first_slice = slices * part;
  }
};

// Layout constants for a weight of element type W.
template <class W>
struct SliceTraits {
  static constexpr bool kIsInt4 = std::is_same_v<W, Int4x2>, kHasScaledX = std::is_same_v<W, Float8>;
  static constexpr bool kScaled = kIsInt4 || kHasScaledX;
  static constexpr int kElements = kIsInt4 ? 2 * kSliceBytes : kSliceBytes / static_cast<int>(sizeof(W));
  static constexpr int kXPanels = kIsInt4 ? 4 : 1;  // panels of x, 128 bytes per row, that match one weight slice
  static constexpr int kGroups = kIsInt4 ? 2 : 1;   // scale groups per slice
};

// W: element type of the weight; T: of y, and of x unless W is Float8; kColumns: rows of x.
template <class T, class W, int kColumns>
class SmallMGemm : SliceTraits<W> {
  using Slice = SliceTraits<W>;
  using Slice::kGroups, Slice::kHasScaledX, Slice::kIsInt4, Slice::kScaled, Slice::kXPanels;
  using X = std::conditional_t<kHasScaledX, Float8, T>;

 public:
  static constexpr int kPanelBytes = kColumns * kSliceBytes, kXBytes = kPanelBytes * kXPanels;
  static constexpr unsigned kReaders = kScaled ? 4 : 1;  // arrivals per warpgroup; with scales, one per warp
  using Barriers = RingBarriers<kMaxStages>;

  __device__ SmallMGemm(const WgmmaSmallMGemm& w, Barriers& barriers, unsigned char* ring)
      : w_(w), work_(w, Slice::kElements), barriers_(barriers), ring_(ring) {}

  // Copy the weight; called by one thread. It fills the ring before x is ready.
  __device__ void copy_weight() {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
    const int rows = w_.rows_per_stage();
    const int bytes = w_.depth * w_.slice_bytes() + w_.scales * rows * 4;
    Turn<kMaxStages> turn, arriving;
    int in_flight = 0;
    int row = work_.first * w_.tile_rows;
    for (int group = 0; group < w_.groups; ++group, row += rows)
      for (int slice = 0; slice < work_.slices; slice += w_.depth, turn.advance(w_.stages)) {
        barriers_.empty[turn.at].wait(turn.parity ^ 1);
        if (in_flight == w_.max_stages_in_flight) {
          barriers_.full[arriving.at].wait(arriving.parity);
          arriving.advance(w_.stages);
        } else {
          ++in_flight;
        }
        uint64_t* const full = &barriers_.full[turn.at].state;
        cute::set_barrier_transaction_bytes(*full, bytes);
        void* const to = stage_at(turn.at);
        if (w_.p.gated)
          cute::SM90_TMA_LOAD_5D::copy(&w_.weight, full, kHint, to, 0, 0, 0, row / 16, work_.first_slice + slice);
        else
          cute::SM90_TMA_LOAD_3D::copy(&w_.weight, full, kHint, to, 0, row, work_.first_slice + slice);
        if constexpr (kScaled) {
          void* const scales = weight_scales_of(turn.at);
          if (w_.p.gated)
            cute::SM90_TMA_LOAD_3D::copy(&w_.weight_scales, full, kHint, scales, row / 2, 0, group_of(slice));
          else
            cute::SM90_TMA_LOAD_2D::copy(&w_.weight_scales, full, kHint, scales, row, group_of(slice));
        }
      }
  }

  // Copy x; called by one other thread.
  __device__ void copy_x() {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
    constexpr int kScaleBytes = kHasScaledX ? kColumns * 4 : 0;
    wait_for_kernels_before();
    Turn<kMaxStages> turn;
    for (int group = 0; group < w_.groups; ++group)
      for (int slice = 0; slice < work_.slices; slice += w_.depth, turn.advance(w_.stages)) {
        barriers_.empty[turn.at].wait(turn.parity ^ 1);
        uint64_t* const full = &barriers_.x_full[turn.at].state;
        cute::set_barrier_transaction_bytes(*full, w_.depth * kXBytes + w_.scales * kScaleBytes);
        cute::SM90_TMA_LOAD_3D::copy(&w_.x, full, kHint, x_of(turn.at), 0, 0, (work_.first_slice + slice) * kXPanels);
        if constexpr (kHasScaledX)
          cute::SM90_TMA_LOAD_2D::copy(&w_.x_scales, full, kHint, x_scales_of(turn.at), 0, group_of(slice));
      }
  }

  // Multiply the warpgroup's tile of each group; called by every consumer warpgroup.
  __device__ void multiply() {
    const int mine = threadIdx.x / kWarpgroup;
    Sums sums = {};
    Turn<kMaxStages> turn;
    wait_for_kernels_before();  // one of them may still write to `y`
    for (int group = 0; group < w_.groups; ++group) {
      const int tile = work_.first + group * w_.tiles_per_stage + mine;
      if constexpr (kScaled) {
        multiply_scaled(mine, turn, sums);
        w_.split > 1 ? reduce_and_write(tile, sums) : write(tile, sums);
        continue;
      }
      int previous = -1;
      for (int slice = 0; slice < work_.slices; slice += w_.depth) {
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
        if (previous >= 0) release(previous);
        previous = turn.at;
        turn.advance(w_.stages);
      }
      cute::warpgroup_wait<0>();
      pin(sums);
      if (previous >= 0) release(previous);
      w_.split > 1 ? reduce_and_write(tile, sums) : write(tile, sums);
    }
  }

 private:
  using Multiply = Wgmma<X, kColumns, cute::SM90::GMMA::Major::K>;
  using Sums = float[kColumns / 8][4];
  static constexpr int kSteps = kSliceBytes / 32;  // wgmma steps per panel

  // A stage holds its weight slices, then its slices of x, then scales. The partner block's sums follow the stages.
  __device__ unsigned char* stage_at(int stage) const { return ring_ + stage * w_.stage_bytes; }
  __device__ unsigned char* x_of(int stage) const { return stage_at(stage) + w_.depth * w_.slice_bytes(); }
  __device__ float* weight_scales_of(int stage) const {
    return reinterpret_cast<float*>(x_of(stage) + w_.depth * kXBytes);
  }
  __device__ float* x_scales_of(int stage) const {
    return weight_scales_of(stage) + scales_bytes(w_.scales, w_.rows_per_stage()) / 4;
  }
  // Return the first scale group of a stage that starts at `slice`.
  __device__ int group_of(int slice) const { return w_.p.groups > 1 ? (work_.first_slice + slice) * kGroups : 0; }
  __device__ float2* partner_sums() const { return reinterpret_cast<float2*>(stage_at(w_.stages)); }

  // Mark a stage as read. One thread arrives per warpgroup, because wgmma reads for the whole warpgroup; with scales,
  // one per warp, because each warp reads scales for itself.
  __device__ void release(int stage) {
    if constexpr (kScaled) __syncwarp();
    if (threadIdx.x % (kWarpgroup / kReaders) == 0) barriers_.empty[stage].arrive();
  }

  // Convert the i-th of a word's four INT4 pairs to T and subtract the zero point. OR-ing 4 bits into the mantissa of
  // 128 (bfloat16) or 1024 (float16) adds them as units, so the constant and the zero point are subtracted at once.
  static __device__ constexpr uint32_t units() { return std::is_same_v<T, BFloat16> ? 0x43004300 : 0x64006400; }
  static __device__ uint32_t minus_zero_point(uint32_t zero) { return (units() | 0x80008000) | zero | zero << 16; }
  static __device__ uint32_t dequantized(uint32_t word, int i, uint32_t minus_zeros) {
    const uint32_t biased = (word >> 4 * i & 0x000f000f) | units();
    uint32_t out;
    if constexpr (std::is_same_v<T, BFloat16>)
      asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(biased), "r"(minus_zeros));
    else
      asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(biased), "r"(minus_zeros));
    return out;
  }

  // The first of a thread's two rows in the stage, and the indices of both rows' scales.
  struct ThreadRows {
    int row, low, high;
  };
  // Walks the scale groups of a block's K range.
  struct GroupCursor {
    Turn<kMaxStages> stage;
    int group = 0;  // within the stage
  };
  using Dequantized = uint32_t[kIsInt4 ? 2 * kSteps : 1][4];

  __device__ float2 weight_scales(const GroupCursor& at, const ThreadRows& place) const {
    const float* const group_scales =
        weight_scales_of(at.stage.at) + (w_.scales > 1 ? at.group : 0) * w_.rows_per_stage();
    return {group_scales[place.low], group_scales[place.high]};
  }

  // Start to multiply the next group; waits for its stage.
  __device__ void start_group(GroupCursor& next, const ThreadRows& place, Dequantized& rows, Sums& part) {
    if (next.group == 0) barriers_.wait_for_both(next.stage);
    const int i = next.group / kGroups, half = next.group % kGroups;
    const unsigned char* const slice = stage_at(next.stage.at) + i * w_.slice_bytes();
    const uint64_t x = wgmma_operand(x_of(next.stage.at), 0) + (i * kXBytes >> 4);
    if constexpr (kIsInt4) {
      // Undo the TMA swizzle, which permutes the 16-byte units of every eight rows.
      const int lane = threadIdx.x % kWarp;
      const unsigned char* const from = slice + place.row * kSliceBytes + ((half * 4 + lane % 4) ^ lane / 4) * 16;
      const uint4 top = *reinterpret_cast<const uint4*>(from);
      const uint4 bottom = *reinterpret_cast<const uint4*>(from + 8 * kSliceBytes);
      const uint32_t top_words[] = {top.x, top.y, top.z, top.w},
                     bottom_words[] = {bottom.x, bottom.y, bottom.z, bottom.w};
      const float2 scales = weight_scales(next, place);
      const uint32_t minus_top = minus_zero_point(Int4Scale(scales.x).zero);
      const uint32_t minus_bottom = minus_zero_point(Int4Scale(scales.y).zero);
#pragma unroll
      for (int k = 0; k < 2 * kSteps; ++k)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          rows[k][2 * e] = dequantized(top_words[k / 2], k % 2 * 2 + e, minus_top);
          rows[k][2 * e + 1] = dequantized(bottom_words[k / 2], k % 2 * 2 + e, minus_bottom);
        }
    }
    pin(part);
    cute::warpgroup_arrive();
    if constexpr (kIsInt4) {
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

  // Scale the next group's products and add them to `sums`. kInFlight later groups are still being multiplied.
  template <int kInFlight>
  __device__ void add_group(GroupCursor& next, const ThreadRows& place, Sums& part, Sums& sums) {
    float2 scales = weight_scales(next, place);
    if constexpr (kIsInt4) scales = {Int4Scale(scales.x).scale, Int4Scale(scales.y).scale};
    float2 column_scales[kHasScaledX ? kColumns / 8 : 1];
    const auto read_x_scales = [&] {
      const float* const x_scales = x_scales_of(next.stage.at) + (w_.scales > 1 ? next.group : 0) * kColumns;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
        column_scales[n] = *reinterpret_cast<const float2*>(x_scales + n * 8 + threadIdx.x % 4 * 2);
    };
    if constexpr (kHasScaledX && kColumns <= 32) read_x_scales();
    cute::warpgroup_wait<kInFlight>();
    pin(part);
    if constexpr (kHasScaledX && kColumns > 32) read_x_scales();  // for which there are no registers before
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float2 x_scales_pair = kHasScaledX ? column_scales[kHasScaledX ? n : 0] : float2{1, 1};
      sums[n][0] += part[n][0] * (x_scales_pair.x * scales.x);
      sums[n][1] += part[n][1] * (x_scales_pair.y * scales.x);
      sums[n][2] += part[n][2] * (x_scales_pair.x * scales.y);
      sums[n][3] += part[n][3] * (x_scales_pair.y * scales.y);
    }
    const int stage = next.stage.at;
    if (advance(next)) release(stage);
  }
  // Advance to the next group. Return whether that was the stage's last one.
  __device__ bool advance(GroupCursor& next) const {
    if (++next.group < w_.depth * kGroups) return false;
    next.group = 0;
    next.stage.advance(w_.stages);
    return true;
  }

  // Multiply a group of tiles of a quantized weight. With few columns, one scale group is multiplied while the previous
  // one is scaled and the next one is dequantized.
  __device__ void multiply_scaled(int mine, Turn<kMaxStages>& turn, Sums& sums) {
#pragma unroll
    for (auto& column_sums : sums)
#pragma unroll
      for (float& sum : column_sums) sum = 0;
    const int thread = threadIdx.x % kWarpgroup, warp = thread / kWarp, lane = thread % kWarp;
    const int row = mine * w_.tile_rows + warp * 16 + lane / 4;
    const int gate = mine * w_.tile_rows / 2 + warp * 8 + lane / 4;
    const ThreadRows place =
        w_.p.gated ? ThreadRows{row, gate, gate + w_.rows_per_stage() / 2} : ThreadRows{row, row, row + 8};
    const int groups = work_.slices * kGroups;
    GroupCursor starting{turn}, adding{turn};
    Dequantized rows_a;
    Sums part_a;
    if constexpr (kColumns <= (kIsInt4 ? 16 : 32)) {
      Dequantized rows_b;
      Sums part_b;
      start_group(starting, place, rows_a, part_a);
      int group = 1;
      for (; group + 1 < groups; group += 2) {
        start_group(starting, place, rows_b, part_b);
        add_group<1>(adding, place, part_a, sums);
        start_group(starting, place, rows_a, part_a);
        add_group<1>(adding, place, part_b, sums);
      }
      if (group < groups) {
        start_group(starting, place, rows_b, part_b);
        add_group<1>(adding, place, part_a, sums);
        add_group<0>(adding, place, part_b, sums);
      } else {
        add_group<0>(adding, place, part_a, sums);
      }
    } else {
      for (int group = 0; group < groups; ++group) {
        start_group(starting, place, rows_a, part_a);
        add_group<0>(adding, place, part_a, sums);
      }
    }
    turn = adding.stage;
  }

  // Where a thread writes. Its sums belong to rows lane / 4 and lane / 4 + 8 of its warp's 16, and to columns
  // 2 (lane % 4) and the next one of every eight. Everything is computed up front, because code that runs once stalls
  // on instruction fetches.
  struct OutputPlace {
    unsigned char* y;  // in the first column
    int64_t stride;    // in bytes
    int columns;       // columns left, from the first one on
    bool gated, has_low, has_high, is_float32;
    float low_bias, high_bias;

    __device__ void put(int column, float low, float high) const {
      if (column >= columns) return;
      unsigned char* const to = y + column * stride;
      low += low_bias, high += high_bias;
      if (gated) low = layers::silu_mul(low, high);
      if (is_float32)
        store(reinterpret_cast<float*>(to), low, high);
      else
        store(reinterpret_cast<T*>(to), low, high);
    }
    template <class Y>
    __device__ void store(Y* to, float low, float high) const {
      if (has_low) to[0] = from_float<Y>(low);
      if (has_high) to[8] = from_float<Y>(high);
    }
  };
  __device__ OutputPlace place(int tile, int odd) const {
    const SmallMGemmParams& p = w_.p;
    const int thread = threadIdx.x % kWarpgroup, warp = thread / kWarp, lane = thread % kWarp;
    const int row = warp * 16 + lane / 4, column = lane % 4 * 2 + odd;
    const int64_t first = int64_t{tile} * w_.tile_rows;
    const int64_t out = p.gated ? first / 2 + warp * 8 + lane / 4 : first + row, high = p.gated ? p.out + out : out + 8;
    const bool has_low = row < w_.tile_rows && out < p.out, has_high = row + 8 < w_.tile_rows && out + 8 < p.out;
    const T* const bias = static_cast<const T*>(p.bias);
    const int64_t y_bytes = p.float32_y ? sizeof(float) : sizeof(T);
    return {.y = static_cast<unsigned char*>(p.y) + (column * p.y_stride + out) * y_bytes,
            .stride = p.y_stride * y_bytes,
            .columns = static_cast<int>(p.rows) - column,
            .gated = p.gated,
            .has_low = has_low,
            .has_high = has_high && !p.gated,
            .is_float32 = p.float32_y,
            .low_bias = bias && has_low ? to_float(bias[out]) : 0,
            .high_bias = bias && (p.gated ? has_low : has_high) ? to_float(bias[high]) : 0};
  }
  __device__ void write(int tile, const Sums& sums) const {
    const OutputPlace to = place(tile, 0);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) to.put(n * 8 + c, sums[n][c], sums[n][2 + c]);
  }
  // Reduce the sums of the two blocks that share a tile. One block writes the even columns, the other the odd ones;
  // each receives its partner's sums for the columns that it writes.
  __device__ void reduce_and_write(int tile, const Sums& sums) const {
    const bool odd = work_.part == 1;
    const int threads = w_.tiles_per_stage * kWarpgroup;
    float2* remote = Cluster::at(partner_sums(), static_cast<unsigned>(1 - work_.part)) + threadIdx.x;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n, remote += threads)
      *remote = odd ? float2{sums[n][0], sums[n][2]} : float2{sums[n][1], sums[n][3]};
    const OutputPlace to = place(tile, work_.part);
    Cluster::sync();
    const float2* local = partner_sums() + threadIdx.x;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n, local += threads)
      to.put(n * 8, (odd ? sums[n][1] : sums[n][0]) + local->x, (odd ? sums[n][3] : sums[n][2]) + local->y);
  }

  const WgmmaSmallMGemm& w_;
  const BlockWork work_;
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
  begin_ring(w.weight, w.x, barriers, w.stages, static_cast<unsigned>(w.tiles_per_stage) * Kernel::kReaders);
  __syncthreads();
  if (Cluster::size() > 1) Cluster::arrive();  // the partner may now access this block's shared memory
  Kernel kernel(w, barriers, ring);
  const int warp = static_cast<int>(threadIdx.x) / kWarp - 4 * w.tiles_per_stage;  // after the consumer warps
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

// Return the tensor map of a matrix seen as slices: one copy brings `depth` slices of `box_rows` rows, panel after
// panel.
template <class X>
CUtensorMap rows_map(const void* data, int64_t rows, int64_t width, int64_t stride, int box_rows, int depth) {
  constexpr int kSlice = kSliceBytes / sizeof(X);
  return tensor_map<3>("small_m_gemm", data, kDtypeOf<X>, {kSlice, size(rows), size(width / kSlice)},
                       {size(rows > 1 ? stride : width) * sizeof(X), kSliceBytes},
                       {kSlice, part(box_rows), part(depth)});
}

// Return the tensor map of a fused gate and up weight: one copy interleaves eight rows of the gate with eight of up.
template <class X>
CUtensorMap gated_map(const SmallMGemmParams& p, int64_t width, int box_rows, int depth) {
  constexpr int kSlice = kSliceBytes / sizeof(X);
  const int64_t row = p.weight_stride * sizeof(X);
  return tensor_map<5>("small_m_gemm", p.weight, kDtypeOf<X>, {kSlice, 8, 2, size(p.out / 8), size(width / kSlice)},
                       {size(row), size(row * p.out), size(row * 8), kSliceBytes},
                       {kSlice, 8, 2, part(box_rows / 16), part(depth)});
}

// Return the tensor map of scales: one copy brings those of `box_rows` rows in `scales` groups.
CUtensorMap scales_map(const float* data, int64_t rows, int64_t groups, int64_t stride, int box_rows, int scales) {
  const int64_t row = groups > 1 ? stride : (rows + 3) / 4 * 4;
  return tensor_map<2>("small_m_gemm", data, kFloat32, {size(rows), size(groups)}, {size(row * 4)},
                       {part(box_rows), part(scales)});
}

// Return the tensor map of a fused weight's scales: half of a copy's rows are the gate's, half those of up.
CUtensorMap gated_scales_map(const SmallMGemmParams& p, int box_rows, int scales) {
  const int64_t row = p.groups > 1 ? p.weight_scales_stride : 2 * p.out;
  return tensor_map<3>("small_m_gemm", p.weight_scales, kFloat32, {size(p.out), 2, size(p.groups)},
                       {size(p.out * 4), size(row * 4)}, {part(box_rows / 2), 2, part(scales)});
}

// Division of the weight among blocks, stages and slices.
struct Tiling {
  int split, clusters, tile_rows, tiles_per_stage, groups, depth, stages, stage_bytes, max_stages_in_flight, bytes;

  // scale_groups: 0, 1 for per-row scales, or the number of groups of a row.
  template <class W>
  Tiling(SliceTraits<W>, int rows, int64_t width, int columns, int64_t scale_groups, bool gated, int num_sms) {
    using Slice = SliceTraits<W>;
    const int slices = static_cast<int>(width / Slice::kElements);
    const auto ceil_div = [](int whole, int part) { return (whole + part - 1) / part; };
    split = slices % 2 == 0 && ceil_div(rows, num_sms / 2) <= kMaxTiles * kTile ? 2 : 1;
    const int even_rows = ceil_div(rows, num_sms / split), step = gated ? 16 : 8;
    int best_rows = INT_MAX;  // rows per block
    for (int tiles = 1; tiles <= kMaxTiles; ++tiles) {
      const int groups_of_tiles = ceil_div(even_rows, tiles * kTile), all = groups_of_tiles * tiles;
      if (split > 1 && groups_of_tiles > 1) continue;  // split-K reduces a single group
      const int rows_per_block = all * ceil_div(ceil_div(even_rows, all), step) * step;
      if (rows_per_block > best_rows || (rows_per_block == best_rows && groups_of_tiles == groups)) continue;
      best_rows = rows_per_block, tiles_per_stage = tiles, groups = groups_of_tiles, tile_rows = rows_per_block / all;
    }
    clusters = ceil_div(rows, best_rows);
    // wgmma reads 64 rows even where a tile has fewer, so the ring needs room after its last tile.
    const int partner_sums = split > 1 ? tiles_per_stage * kWarpgroup * columns : 0;
    const int tail_bytes = std::max((kTile - tile_rows) * kSliceBytes, partner_sums),
              stage_rows = tiles_per_stage * tile_rows;
    const auto stage_of = [&](int slices_per_stage) {
      const int scales = scale_groups > 1 ? slices_per_stage * Slice::kGroups : static_cast<int>(scale_groups);
      const int x_bytes = columns * kSliceBytes * Slice::kXPanels;
      const int all = slices_per_stage * (stage_rows * kSliceBytes + x_bytes) + scales_bytes(scales, stage_rows) +
                      scales_bytes(Slice::kHasScaledX ? scales : 0, columns);
      return ceil_div(all, 1024) * 1024;  // panels are aligned to 1024 bytes
    };
    // Deep stages amortize the copy and the barrier, which would cost more than the bytes of a single slice. Many
    // stages keep the bytes in flight even, which matters most where x is a small part of them.
    const int min_stages = columns > 32 ? 4 : 6;
    for (depth = 1; depth < kMaxDepth && slices % (2 * depth * split) == 0;) {
      if (min_stages * stage_of(2 * depth) + tail_bytes > kRingBytes) break;
      depth *= 2;
    }
    stage_bytes = stage_of(depth);
    stages = std::min(kMaxStages, (kRingBytes - tail_bytes) / stage_bytes);
    max_stages_in_flight = std::min(stages, ceil_div(kBytesInFlight, depth * stage_rows * kSliceBytes));
    bytes = stages * stage_bytes + tail_bytes;
  }
};

template <class T, class W, int kColumns>
void start(const SmallMGemmParams& p, Stream stream) {
  using Slice = SliceTraits<W>;
  using X = std::conditional_t<Slice::kHasScaledX, Float8, T>;
  const auto kernel = wgmma_small_m_gemm_kernel<T, W, kColumns>;
  SD_CUDA_CHECK("small_m_gemm", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes));
  const Tiling tiling(Slice{}, static_cast<int>(p.gated ? 2 * p.out : p.out), p.in, kColumns, p.groups, p.gated,
                      current_device("small_m_gemm").num_sms);
  const int stage_rows = tiling.tiles_per_stage * tiling.tile_rows;
  const int scales = p.groups > 1 ? tiling.depth * Slice::kGroups : static_cast<int>(p.groups);
  const int64_t width = Slice::kIsInt4 ? p.in / 2 : p.in;  // in elements of the weight's type
  CUtensorMap weight_scales{}, x_scales{};
  if constexpr (Slice::kScaled)
    weight_scales = p.gated ? gated_scales_map(p, stage_rows, scales)
                            : scales_map(p.weight_scales, p.out, p.groups, p.weight_scales_stride, stage_rows, scales);
  if constexpr (Slice::kHasScaledX)
    x_scales = scales_map(p.x_scales, p.rows, p.groups, p.x_scales_stride, kColumns, scales);
  const WgmmaSmallMGemm w{
      .weight = p.gated ? gated_map<W>(p, width, stage_rows, tiling.depth)
                        : rows_map<W>(p.weight, p.out, width, p.weight_stride, stage_rows, tiling.depth),
      .x = rows_map<X>(p.x, p.rows, p.in, p.x_stride, kColumns, tiling.depth * Slice::kXPanels),
      .weight_scales = weight_scales,
      .x_scales = x_scales,
      .p = p,
      .split = tiling.split,
      .tile_rows = tiling.tile_rows,
      .tiles_per_stage = tiling.tiles_per_stage,
      .groups = tiling.groups,
      .depth = tiling.depth,
      .stages = tiling.stages,
      .stage_bytes = tiling.stage_bytes,
      .max_stages_in_flight = tiling.max_stages_in_flight,
      .scales = scales,
  };
  launch("small_m_gemm", kernel,
         {.grid = static_cast<unsigned>(tiling.clusters * tiling.split),
          .threads = static_cast<unsigned>(tiling.tiles_per_stage * kWarpgroup + 2 * kWarp),
          .shared_bytes = static_cast<size_t>(tiling.bytes),
          .cluster = static_cast<unsigned>(tiling.split)},
         stream, w);
}

}  // namespace

void wgmma_small_m_gemm(const SmallMGemmParams& all, Stream stream) {
  // Round the rows of x up to a supported N of wgmma, at most kMost.
  const auto start_part = [&]<class T, class W, int kMost>(const SmallMGemmParams& p) {
    if (p.rows <= 8) return start<T, W, 8>(p, stream);
    if (p.rows <= 16) return start<T, W, 16>(p, stream);
    if (kMost == 32 || p.rows <= 32) return start<T, W, 32>(p, stream);
    if constexpr (kMost >= 64)
      if (kMost == 64 || p.rows <= 64) return start<T, W, 64>(p, stream);
    if constexpr (kMost > 64) p.rows <= 96 ? start<T, W, 96>(p, stream) : start<T, W, kMost>(p, stream);
  };
  const auto of_types = [&]<class T, class W, int kMost>() {
    using X = std::conditional_t<SliceTraits<W>::kHasScaledX, Float8, T>;
    for (int64_t first = 0; first < all.rows; first += kMost) {
      SmallMGemmParams part = all;
      part.x = static_cast<const X*>(all.x) + first * all.x_stride;
      part.y = all.y_row(first);
      if (all.x_scales) part.x_scales = all.x_scales + first;
      part.rows = std::min<int64_t>(all.rows - first, kMost);
      start_part.template operator()<T, W, kMost>(part);
    }
  };
  const auto of_type = [&]<class T>() {
    if (all.bits == 8) return of_types.template operator()<T, Float8, kMaxScaledColumns>();
    if (all.bits == 4) return of_types.template operator()<T, Int4x2, kMaxInt4Columns>();
    of_types.template operator()<T, T, kMaxColumns>();
  };
  if (all.dtype == kBFloat16)
    of_type.template operator()<BFloat16>();
  else
    of_type.template operator()<Half>();
}

}  // namespace specdec::layers
