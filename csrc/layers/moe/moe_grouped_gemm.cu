// Grouped GEMM of MoE experts with mma.sync. Experts that no row selected are not read; the others are read once per
// few rows that selected them.
//
// A work item is a tile of 16 weight rows of one expert for up to kMaxPairs of its (row, expert) pairs. The number of
// items is known only on the device: each block counts them and strides over its own, so that adjacent blocks read
// adjacent memory. A warp copies slices (128 bytes of each of the 16 rows) into its own cp.async ring, which runs on
// into the next item. A block is one warp and waits for no other: per-item setup and epilogue (search, pairs, sums)
// take longer than a slice, and other blocks hide them. Only if there are too few items to hide a slice's latency,
// several warps share an item, split K and add their sums.
//
// An expert's weight is read once, its rows of x once per tile, mostly from caches: the lower bound is the selected
// experts' bytes over bandwidth.
//
// FP8 elements are converted exactly to 16 bits in registers; tensor cores accumulate in float32, and each slice's sum
// is scaled. m16n8k16, with weight rows as M and rows of x as N. The order of elements along K is free as long as both
// operands agree: a thread takes sixteen contiguous FP8 elements for four steps, or eight 16-bit ones for two, so
// 16-byte reads serve both.
//
// Programmatic dependent launch: the next kernel is set up only when all kernels before this one have finished. If that
// next kernel is this op with the same routing (routing_ready), it may read the routing while this one still runs and
// fill its rings, so memory never idles between the two.
#include <algorithm>

#include "core/copy_async.cuh"
#include "core/mma.cuh"
#include "core/warp.cuh"
#include "layers/activation/silu_and_mul.h"
#include "layers/moe/moe_grouped_gemm.h"

namespace specdec::layers {
namespace {

constexpr int kTile = 16;    // weight rows
constexpr int kSlice = 128;  // bytes of each row
constexpr int kSliceBytes = kTile * kSlice;
constexpr int kDepth = 6;  // of a warp's ring, in slices
constexpr int kMaxWarpsPerSm = 16;
// Mean pairs of an expert up to which an item has 8 of them at most: then next to no expert has more, and such items
// leave registers to load ahead.
constexpr int kFewPairs = 5;
constexpr int kReservedBytes = 1024;  // of shared memory, that CUDA takes for each block

// Parts of K that are summed separately in every call. So a row gets the same bits whether one warp handles an item or
// several split it, i.e. whatever the batch. 16-bit rows have twice as many slices, and parts.
template <class W>
constexpr int kParts = 2 * sizeof(W);

// Return the first slice of a part of K.
template <class W>
__device__ int64_t begin_of_part(int part, int64_t slices) {
  return part * slices / kParts<W>;
}

template <class X>
constexpr bool kIsFloat8 = std::is_same_v<X, Float8>;

// Elements of W that a thread reads from half a slice of a row: 16 contiguous bytes.
template <class W>
constexpr int kElements = 16 / sizeof(W);

// The matching elements of a row of x.
template <class X, class W>
struct XFragment {
  static constexpr int kPacks = kElements<W> * sizeof(X) / 16;
  uint4 packs[kPacks];
};

// Convert four FP8 elements to two pairs of T.
template <class T>
__device__ __forceinline__ void dequantize_fp8x4(uint32_t word, uint32_t& low, uint32_t& high) {
  const auto convert_pair = [](uint32_t two) {
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
    if constexpr (std::is_same_v<T, Half>) {
      return static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
    } else {
      const float2 both = __half22float2(__half2(raw));
      const __nv_bfloat162_raw out = __float22bfloat162_rn(both);
      return static_cast<uint32_t>(out.x) | static_cast<uint32_t>(out.y) << 16;
    }
  };
  low = convert_pair(word & 0xffff);
  high = convert_pair(word >> 16);
}

__device__ __forceinline__ uint32_t word_of(const uint4& pack, int i) {
  return i == 0 ? pack.x : i == 1 ? pack.y : i == 2 ? pack.z : pack.w;
}

// A tile of an expert's weight, and the chunk of the expert's pairs that it is multiplied with.
struct Item {
  int expert, chunk, tile;
};

// The work items of a call. An expert has one chunk per max_pairs of its pairs, and a chunk has one item per tile.
class Items {
 public:
  // Count the chunks of all experts; called by all threads of a block, ends in a barrier.
  __device__ Items(const MoeGroupedGemmParams& p, int max_pairs, int* chunk_ends) : p_(p), chunk_ends_(chunk_ends) {
    constexpr int kAtOnce = 8;  // loads in flight
    const int experts = static_cast<int>(p.all_experts()), lane = lane_id();
    if (warp_id() == 0) {
      int begin = 0, chunks = 0;  // of the experts before
      for (int first = 0; first < experts; first += kAtOnce * kWarp) {
        int ends[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
          ends[n] = static_cast<int>(p.begin(min(first + n * kWarp + lane + 1, experts)));
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          const int expert = first + n * kWarp + lane, below = __shfl_up_sync(kFullMask, ends[n], 1);
          const int pairs = max(ends[n] - (lane > 0 ? below : begin), 0);
          const int end = chunks + sum_up_to_lane((pairs + max_pairs - 1) / max_pairs);
          if (expert < experts) chunk_ends[expert] = end;
          begin = __shfl_sync(kFullMask, ends[n], kWarp - 1);
          chunks = __shfl_sync(kFullMask, end, kWarp - 1);
        }
      }
    }
    __syncthreads();
    tiles_ = static_cast<int>(p.weight_rows() / kTile);
    count_ = int64_t{chunk_ends[experts - 1]} * tiles_;
  }

  __device__ int64_t count() const { return count_; }
  // Find an item, by all lanes of a warp.
  __device__ Item at(int64_t i) const {
    const int chunk = static_cast<int>(i / tiles_), experts = static_cast<int>(p_.all_experts()),
              lane = hold(lane_id());
    const int each = (experts + kWarp - 1) / kWarp;  // experts of a lane
    // The first expert whose chunks end after this one.
    const bool mine = chunk_ends_[min((lane + 1) * each, experts) - 1] > chunk;
    const int first = (__ffs(__ballot_sync(kFullMask, mine)) - 1) * each;
    const bool is_after = lane < each && chunk_ends_[min(first + lane, experts - 1)] > chunk;
    const int expert = first + __ffs(__ballot_sync(kFullMask, is_after)) - 1;
    return {expert, chunk - (expert > 0 ? chunk_ends_[expert - 1] : 0), static_cast<int>(i - int64_t{chunk} * tiles_)};
  }

 private:
  const MoeGroupedGemmParams& p_;
  const int* const chunk_ends_;
  int tiles_;
  int64_t count_;
};

// Return the first weight row of a tile within its expert: eight from there on, and eight below. A gated tile has gate
// rows on top and the matching up rows below, another tile has adjacent rows.
__device__ int64_t top_row(const MoeGroupedGemmParams& p, const Item& item) {
  return int64_t{item.tile} * (p.gated ? kTile / 2 : kTile);
}

// A warp's cp.async ring of weight slices, which runs on from one item to the next.
template <class W, int kWarps>
class Ring {
 public:
  __device__ Ring(const MoeGroupedGemmParams& p, const Items& items, unsigned char* stages)
      : p_(p),
        items_(items),
        stages_(stages),
        item_(blockIdx.x),
        begin_(kWarps > 1 ? begin_of_part<W>(warp_id(), in_bytes() / kSlice) * kSlice : 0),
        end_(kWarps > 1 ? begin_of_part<W>(warp_id() + 1, in_bytes() / kSlice) * kSlice : in_bytes()) {
    begin_item();
  }

  // Copy 16 bytes of row lane / 8 and of every fourth row after it. Odd rows swap their halves, so rows that are read
  // together have no bank conflicts. After the last item nothing is copied, but a group is committed all the same.
  __device__ void fetch(int stage) {
    if (at_ < end_) {
      const int lane = lane_id();
      unsigned char* const to = stages_ + stage * kSliceBytes;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i * 4 + lane / 8;
        copy_async(to + row * kSlice + ((lane % 8) ^ (row % 2 * 4)) * 16,
                   (i < 2 ? top_ : bottom_) + i % 2 * 4 * row_bytes_ + at_);
      }
      at_ += kSlice;
      if (at_ >= end_) {
        item_ += gridDim.x;
        begin_item();
      }
    }
    commit_copies();
  }

 private:
  __device__ int64_t in_bytes() const { return p_.in * int64_t{sizeof(W)}; }
  __device__ void begin_item() {
    at_ = end_;
    if (item_ >= items_.count() || begin_ == end_) return;
    const Item item = items_.at(item_);
    const ExpertWeight<W> weight = p_.weight_of<W>(item.expert);
    const int lane = hold(lane_id());
    row_bytes_ = weight.stride * int64_t{sizeof(W)};
    top_ = reinterpret_cast<const unsigned char*>(weight.data) + lane % 8 * 16 +
           (top_row(p_, item) + lane / 8) * row_bytes_;
    bottom_ = top_ + (p_.gated ? weight.up_distance : kTile / 2) * row_bytes_;
    at_ = begin_;
  }

  const MoeGroupedGemmParams& p_;
  const Items& items_;
  unsigned char* const stages_;
  int64_t item_;
  const int64_t begin_, end_;  // the warp's part of K, in bytes
  int64_t at_;                 // where the next slice begins along K, in bytes
  int64_t row_bytes_;          // from one row of the item's expert to the next
  const unsigned char *top_, *bottom_;
};

// X, W, T: element types of x, weight and out. kTiles: mma tiles of 8 pairs per item, at most. kWarps: warps per block,
// which split K.
template <class X, class W, class T, int kTiles, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp, kMaxWarpsPerSm / kWarps)
    moe_grouped_gemm_kernel(MoeGroupedGemmParams p) {
  using Operand = std::conditional_t<kIsFloat8<X>, Half, X>;  // of the mma instruction
  constexpr bool kScaled = kIsFloat8<W>;
  constexpr int kMaxPairs = kTiles * 8, kSliceElements = kSlice / sizeof(W);
  // Load x one slice ahead and pairs one item ahead; more rows leave no registers for it.
  constexpr bool kPrefetch = kTiles == 1;
  extern __shared__ __align__(128) unsigned char slices[];
  const auto begin = [] {
    wait_for_kernels_before();
    let_next_kernel_start();
  };
  if (!p.routing_ready) begin();
  const int lane = lane_id(), warp = warp_id(), top_k = static_cast<int>(p.pairs / p.rows);
  const Items items(p, kMaxPairs, reinterpret_cast<int*>(slices + kWarps * kDepth * kSliceBytes));
  unsigned char* const stages = slices + warp * kDepth * kSliceBytes;
  Ring<W, kWarps> ring(p, items, stages);
#pragma unroll 1
  for (int stage = 0; stage < kDepth - 1; ++stage) ring.fetch(stage);
  if (p.routing_ready) begin();

  const int64_t num_slices = p.in / kSliceElements;
  int stage = 0;
  // Pairs of an item. Those after the last repeat it and are not written.
  struct Pairs {
    Item item;
    int first, count, ids[kTiles];
  };
  const auto load_pairs = [&](int64_t i) {
    Pairs pairs;
    pairs.item = items.at(i);
    const int64_t first = p.begin(pairs.item.expert) + pairs.item.chunk * kMaxPairs;
    pairs.first = static_cast<int>(first);
    pairs.count = static_cast<int>(min(p.begin(pairs.item.expert + 1) - first, int64_t{kMaxPairs}));
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      pairs.ids[n] = static_cast<int>(p.pair(first + min(n * 8 + lane / 4, pairs.count - 1)));
    return pairs;
  };
  Pairs next;
  if (kPrefetch && blockIdx.x < items.count()) next = load_pairs(blockIdx.x);
  for (int64_t i = blockIdx.x; i < items.count(); i += gridDim.x) {
    const Pairs now = kPrefetch ? next : load_pairs(i);
    if (kPrefetch && i + gridDim.x < items.count()) next = load_pairs(i + gridDim.x);
    const auto& pairs = now.ids;
    const int tiles = (now.count + 7) / 8;
    int x_rows[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) x_rows[n] = pairs[n] / top_k;
    XFragment<X, W> x[kTiles][2];
    const auto read = [&](XFragment<X, W>(&to)[kTiles][2], int64_t at) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (n >= tiles) break;
        const X* const from = static_cast<const X*>(p.x) + x_rows[n] * p.x_stride + at + lane % 4 * kElements<W>;
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int k = 0; k < XFragment<X, W>::kPacks; ++k)
            to[n][u].packs[k] = reinterpret_cast<const uint4*>(from + u * kSliceElements / 2)[k];
      }
    };
    const int first_part = kWarps > 1 ? warp : 0, last_part = kWarps > 1 ? warp : kParts<W> - 1;
    int64_t at = begin_of_part<W>(first_part, num_slices) * kSliceElements;
    const int64_t end = begin_of_part<W>(last_part + 1, num_slices) * kSliceElements;
    if constexpr (kPrefetch) {
      if (at < end) read(x, at);
    }
    float sum[kTiles][4] = {};
#pragma unroll 1
    for (int part = first_part; part <= last_part; ++part) {
      float part_sum[kTiles][4] = {};
#pragma unroll 1
      for (const int64_t part_end = begin_of_part<W>(part + 1, num_slices) * kSliceElements; at < part_end;
           at += kSliceElements) {
        // Issue the loads that bypass the ring before waiting for the ring.
        const int64_t group = p.groups > 1 ? at / kSliceElements : 0;
        float low_scale = 1, high_scale = 1;
        if constexpr (kScaled) {
          const float* const weight_scale = p.weight_scales + (now.item.expert * p.groups + group) * p.weight_rows() +
                                            top_row(p, now.item) + lane / 4;
          low_scale = weight_scale[0], high_scale = weight_scale[p.gated ? p.outs : kTile / 2];
        }
        float x_scale[kTiles][2];
        XFragment<X, W> next_x[kTiles][2];
        if constexpr (kPrefetch) {
          if (at + kSliceElements < end) read(next_x, at + kSliceElements);
        } else {
          read(x, at);
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          if (n >= tiles) break;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int row = __shfl_sync(kFullMask, x_rows[n], (lane % 4 * 2 + e) * 4);
            x_scale[n][e] = kIsFloat8<X> ? p.x_scales[group * p.x_scales_stride + row] : 1;
          }
        }
        wait_for_copies<kDepth - 2>();
        __syncwarp();
        const unsigned char* const from = stages + stage * kSliceBytes + lane / 4 * kSlice;
        uint4 a[2][2];
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            a[u][half] = *reinterpret_cast<const uint4*>(from + half * 8 * kSlice +
                                                         ((u * 4 + lane % 4) ^ (lane / 4 % 2 * 4)) * 16);
        // The previous slice has been read by all lanes, so its stage is free.
        ring.fetch(stage == 0 ? kDepth - 1 : stage - 1);
        if (++stage == kDepth) stage = 0;

        float slice_sum[kTiles][4] = {};
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int k = 0; k < kElements<W> / 4; ++k) {
            uint32_t a_regs[4];
            if constexpr (kScaled) {
              dequantize_fp8x4<Operand>(word_of(a[u][0], k), a_regs[0], a_regs[2]);
              dequantize_fp8x4<Operand>(word_of(a[u][1], k), a_regs[1], a_regs[3]);
            } else {
#pragma unroll
              for (int w = 0; w < 4; ++w) a_regs[w] = word_of(a[u][w % 2], 2 * k + w / 2);
            }
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              if (n >= tiles) break;
              uint32_t low, high;
              if constexpr (kIsFloat8<X>) {
                dequantize_fp8x4<Operand>(word_of(x[n][u].packs[0], k), low, high);
              } else {
                low = word_of(x[n][u].packs[k / 2], k % 2 * 2);
                high = word_of(x[n][u].packs[k / 2], k % 2 * 2 + 1);
              }
              mma<Operand>(kScaled ? slice_sum[n] : part_sum[n], a_regs, low, high);
            }
          }
        if constexpr (kScaled) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              if (n < tiles) part_sum[n][e] += slice_sum[n][e] * (x_scale[n][e % 2] * (e < 2 ? low_scale : high_scale));
        }
        if constexpr (kPrefetch) {
#pragma unroll
          for (int u = 0; u < 2; ++u) x[0][u] = next_x[0][u];
        }
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] += part_sum[n][e];
    }

    if constexpr (kWarps > 1) {
      static_assert(kTiles == 1);
      __shared__ float4 sums[kWarps][kWarp];
      __syncthreads();  // the previous item's sums have been read
      sums[warp][lane] = {sum[0][0], sum[0][1], sum[0][2], sum[0][3]};
      __syncthreads();
      if (warp > 0) continue;
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        const float4 more = sums[w][lane];
        sum[0][0] += more.x, sum[0][1] += more.y, sum[0][2] += more.z, sum[0][3] += more.w;
      }
    }
    const int outs = p.gated ? kTile / 2 : kTile;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = lane % 4 * 2 + e;
        int64_t pair = __shfl_sync(kFullMask, pairs[n], column * 4);
        if (n * 8 + column >= now.count) continue;
        if constexpr (!kPrefetch) pair = p.pair(now.first + n * 8 + column);  // again, to keep fewer registers
        T* const to = static_cast<T*>(p.out) + pair * p.out_stride + int64_t{now.item.tile} * outs + lane / 4;
        const float top = sum[n][e], bottom = sum[n][2 + e];
        to[0] = from_float<T>(p.gated ? silu_mul(top, bottom) : top);
        if (!p.gated) to[kTile / 2] = from_float<T>(bottom);
      }
  }
}

template <class X, class W, class T>
void start(const MoeGroupedGemmParams& p, Stream stream) {
  const Device device = current_device("moe_grouped_gemm");
  const auto max_items = [&](int max_pairs) {
    const int64_t touched = std::min(p.all_experts(), p.pairs);
    return p.weight_rows() / kTile * (touched + (p.pairs - touched) / max_pairs);
  };
  const auto with_tiles = [&]<int kTiles, int kWarps>() {
    static_assert(kWarps == 1 || kWarps == kParts<W>);
    const auto kernel = moe_grouped_gemm_kernel<X, W, T, kTiles, kWarps>;
    constexpr int kRings = kWarps * kDepth * kSliceBytes;
    SD_CUDA_CHECK("moe_grouped_gemm", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                           kRings + int{kMaxExperts * sizeof(int)}));
    const int64_t shared_bytes = kRings + p.all_experts() * sizeof(int);
    // Launch as many blocks as fit at once, but no more than there may be items.
    const int64_t room =
        device.num_sms *
        std::min<int64_t>(kMaxWarpsPerSm / kWarps, device.shared_bytes_per_sm / (shared_bytes + kReservedBytes));
    launch("moe_grouped_gemm", kernel,
           {.grid = static_cast<unsigned>(std::min(room, max_items(kTiles * 8))),
            .threads = kWarps * kWarp,
            .shared_bytes = static_cast<size_t>(shared_bytes)},
           stream, p);
  };
  if (p.pairs > kFewPairs * p.all_experts())
    return with_tiles.template operator()<kIsFloat8<W> ? 2 : 4, 1>();  // larger tiles use too many registers
  max_items(8) <= kMaxWarpsPerSm / 2 * device.num_sms ? with_tiles.template operator()<1, kParts<W>>()
                                                      : with_tiles.template operator()<1, 1>();
}

}  // namespace

void moe_grouped_gemm_cuda(const MoeGroupedGemmParams& p, Stream stream) {
  const auto of_type = [&]<class T>() {
    if (!p.weight_scales) return start<T, T, T>(p, stream);
    p.x_scales ? start<Float8, Float8, T>(p, stream) : start<T, Float8, T>(p, stream);
  };
  p.dtype == kBFloat16 ? of_type.template operator()<BFloat16>() : of_type.template operator()<Half>();
}

}  // namespace specdec::layers
