// moe_grouped_gemm by mma.sync: experts that no row takes are not read, the others once for every few rows that take
// them.
//
// Work is items: a tile of 16 rows of an expert's weight for some of its pairs. How many there are only the device
// knows; each block counts them and walks those that are its own, so that neighbours read what lies together. A warp
// copies slices of 128 bytes of each of the 16 rows into a ring of its own (cp.async), which runs on into the next
// item. A block is one warp, which waits for no other: what an item begins and ends with (its search, its pairs, its
// sums) takes longer than a slice, and others multiply meanwhile. Only where items are too few to hide what a slice
// takes in a warp, several share one, a part of the length each, and add up.
//
// It reads an expert's weight once, and its rows of x once for each tile, mostly from caches: the floor is the touched
// weights over the bandwidth.
//
// Numbers of 8 bits become 16-bit ones in registers, exactly so, whose products the tensor cores sum up in float32;
// each slice's sum is scaled. m16n8k16, rows of the weight as its rows and rows of x as its columns. Which numbers
// along a row stand together in a step is free as long as both operands agree: a thread's sixteen of four steps, or
// eight of two where they have 16 bits, are neighbours, so that 16-byte reads serve both.
//
// The next kernel is set up only when all before this one have finished. So where that is this op again, of the same
// pairs, it knows these while this one still runs, and fills its rings: the memory never idles between the two.
#include <algorithm>

#include "core/copy_async.cuh"
#include "core/mma.cuh"
#include "core/warp.cuh"
#include "layers/activation/silu_and_mul.h"
#include "layers/moe/moe_grouped_gemm.h"

namespace specdec::layers {
namespace {

constexpr int kTile = 16;    // rows of the weight
constexpr int kSlice = 128;  // bytes of each
constexpr int kSliceBytes = kTile * kSlice;
constexpr int kDepth = 6;       // of a warp's ring, in slices
constexpr int kMostWarps = 16;  // of a multiprocessor

// Parts of the length that are summed up each for itself, in any call, so that a row gets the same bits alone, where
// warps share an item, and beside others. Rows of numbers of 16 bits have twice as many slices.
template <class W>
constexpr int kParts = 2 * sizeof(W);

// In slices.
template <class W>
__device__ int64_t begin_of_part(int part, int64_t slices) {
  return part * slices / kParts<W>;
}

template <class X>
constexpr bool kIsFloat8 = std::is_same_v<X, Float8>;

// Numbers of a row of W's that a thread has of half a slice: neighbours, of 16 bytes.
template <class W>
constexpr int kNumbers = 16 / sizeof(W);

// As many of a row of X's.
template <class X, class W>
struct Neighbours {
  static constexpr int kPacks = kNumbers<W> * sizeof(X) / 16;
  uint4 packs[kPacks];
};

// Four numbers of 8 bits as pairs of T.
template <class T>
__device__ __forceinline__ void widen(uint32_t word, uint32_t& low, uint32_t& high) {
  const auto widened = [](uint32_t two) {
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
    if constexpr (std::is_same_v<T, Half>) {
      return static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
    } else {
      const float2 both = __half22float2(__half2(raw));
      const __nv_bfloat162_raw out = __float22bfloat162_rn(both);
      return static_cast<uint32_t>(out.x) | static_cast<uint32_t>(out.y) << 16;
    }
  };
  low = widened(word & 0xffff);
  high = widened(word >> 16);
}

__device__ __forceinline__ uint32_t word_of(const uint4& pack, int i) {
  return i == 0 ? pack.x : i == 1 ? pack.y : i == 2 ? pack.z : pack.w;
}

// A tile of an expert's weight, and the places in `order` of the pairs that it is multiplied for.
struct Item {
  int64_t expert, first;
  int tile, count;
};

// The items of a call, by all experts' numbers of chunks of pairs.
class Items {
 public:
  // By all threads of a block, which meet here.
  __device__ Items(const MoeGroupedGemmParams& p, int columns, int* chunk_ends)
      : p_(p), columns_(columns), chunk_ends_(chunk_ends) {
    const int experts = static_cast<int>(p.experts);
    if (warp_id() == 0) {
      const int each = (experts + kWarp - 1) / kWarp;
      const int from = min(lane_id() * each, experts), to = min(from + each, experts);
      int mine = 0;
      for (int e = from; e < to; ++e) mine += chunk_ends[e] = chunks_of(e);
      int before = sum_up_to_lane(mine) - mine;
      for (int e = from; e < to; ++e) chunk_ends[e] = before += chunk_ends[e];
    }
    __syncthreads();
    tiles_ = static_cast<int>(p.weight_rows() / kTile);
    count_ = int64_t{chunk_ends[experts - 1]} * tiles_;
  }

  __device__ int64_t count() const { return count_; }
  __device__ Item at(int64_t i) const {
    const int chunk = static_cast<int>(i / tiles_);
    int expert = 0;  // the first whose chunks end behind this one
    for (int above = static_cast<int>(p_.experts); expert < above;) {
      const int middle = (expert + above) / 2;
      chunk_ends_[middle] > chunk ? above = middle : expert = middle + 1;
    }
    const int of_expert = chunk - (expert > 0 ? chunk_ends_[expert - 1] : 0);
    const int64_t first = p_.begin(expert) + int64_t{of_expert} * columns_;
    return {expert, first, static_cast<int>(i % tiles_),
            static_cast<int>(min(p_.begin(expert + 1) - first, int64_t{columns_}))};
  }

 private:
  __device__ int chunks_of(int expert) const {
    const int64_t pairs = p_.begin(expert + 1) - p_.begin(expert);
    return pairs > 0 ? static_cast<int>((pairs + columns_ - 1) / columns_) : 0;
  }

  const MoeGroupedGemmParams& p_;
  const int columns_;
  const int* const chunk_ends_;
  int tiles_;
  int64_t count_;
};

// The rows of an expert's weight that are a tile's: eight from one place on and eight from another.
struct TileRows {
  int64_t top, bottom;

  __device__ TileRows(const MoeGroupedGemmParams& p, const Item& item) {
    const int64_t expert = item.expert * p.weight_rows();
    top = expert + int64_t{item.tile} * (p.gated ? kTile / 2 : kTile);
    bottom = top + (p.gated ? p.outs : kTile / 2);
  }
};

// A warp's slices of the weight on their way, those of one item behind those of the one before.
template <class W, int kWarps>
class Ring {
 public:
  __device__ Ring(const MoeGroupedGemmParams& p, const Items& items, unsigned char* stages)
      : p_(p),
        items_(items),
        stages_(stages),
        item_(blockIdx.x),
        row_bytes_(p.in * int64_t{sizeof(W)}),
        begin_(kWarps > 1 ? begin_of_part<W>(warp_id(), row_bytes_ / kSlice) * kSlice : 0),
        end_(kWarps > 1 ? begin_of_part<W>(warp_id() + 1, row_bytes_ / kSlice) * kSlice : row_bytes_) {
    begin_item();
  }

  // Sixteen bytes each of row lane / 8 and every fourth, whose halves change places in odd rows: so the rows that are
  // read together meet in no bank. Behind the last item there is nothing to copy, and yet something to wait for.
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
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

 private:
  __device__ void begin_item() {
    at_ = end_;
    if (item_ >= items_.count() || begin_ == end_) return;
    const TileRows rows(p_, items_.at(item_));
    const int lane = lane_id();
    const auto* const weight = static_cast<const unsigned char*>(p_.weight) + lane % 8 * 16;
    top_ = weight + (rows.top + lane / 8) * row_bytes_;
    bottom_ = weight + (rows.bottom + lane / 8) * row_bytes_;
    at_ = begin_;
  }

  const MoeGroupedGemmParams& p_;
  const Items& items_;
  unsigned char* const stages_;
  int64_t item_;
  const int64_t row_bytes_, begin_, end_;  // the warp's part of the length
  int64_t at_;                             // where the next slice begins, along the length
  const unsigned char *top_, *bottom_;
};

// X: of x; W: of weight; T: of out; kTiles: of 8 rows of x that an item has at most; kWarps: of a block, which share
// its items.
template <class X, class W, class T, int kTiles, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp, kMostWarps / kWarps) moe_grouped_gemm_kernel(MoeGroupedGemmParams p) {
  using Number = std::conditional_t<kIsFloat8<X>, Half, X>;  // that is multiplied
  constexpr bool kScaled = kIsFloat8<W>;
  constexpr int kColumns = kTiles * 8, kOfSlice = kSlice / sizeof(W);
  constexpr bool kAhead = kTiles == 1;  // x is read a slice ahead: of more rows there are no registers for it
  extern __shared__ __align__(128) unsigned char slices[];
  const auto begin = [] {
    wait_for_kernels_before();
    let_next_kernel_start();
  };
  if (!p.again) begin();
  const int lane = lane_id(), warp = warp_id(), taken = static_cast<int>(p.pairs / p.rows);
  const Items items(p, kColumns, reinterpret_cast<int*>(slices + kWarps * kDepth * kSliceBytes));
  unsigned char* const stages = slices + warp * kDepth * kSliceBytes;
  Ring<W, kWarps> ring(p, items, stages);
#pragma unroll 1
  for (int stage = 0; stage < kDepth - 1; ++stage) ring.fetch(stage);
  if (p.again) begin();

  const int64_t num_slices = p.in / kOfSlice;
  int stage = 0;
  for (int64_t i = blockIdx.x; i < items.count(); i += gridDim.x) {
    const Item item = items.at(i);
    const TileRows rows(p, item);
    const int tiles = (item.count + 7) / 8;
    // Rows beyond the last are read as the last, and not written.
    int pairs[kTiles], x_rows[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      pairs[n] = static_cast<int>(p.pair(item.first + min(n * 8 + lane / 4, item.count - 1)));
      x_rows[n] = pairs[n] / taken;
    }
    Neighbours<X, W> x[kTiles][2];
    const auto read = [&](Neighbours<X, W>(&to)[kTiles][2], int64_t at) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (n >= tiles) break;
        const X* const from = static_cast<const X*>(p.x) + x_rows[n] * p.x_stride + at + lane % 4 * kNumbers<W>;
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int k = 0; k < Neighbours<X, W>::kPacks; ++k)
            to[n][u].packs[k] = reinterpret_cast<const uint4*>(from + u * kOfSlice / 2)[k];
      }
    };
    const int first_part = kWarps > 1 ? warp : 0, last_part = kWarps > 1 ? warp : kParts<W> - 1;
    int64_t at = begin_of_part<W>(first_part, num_slices) * kOfSlice;
    const int64_t end = begin_of_part<W>(last_part + 1, num_slices) * kOfSlice;
    if constexpr (kAhead) {
      if (at < end) read(x, at);
    }
    float sum[kTiles][4] = {};
#pragma unroll 1
    for (int part = first_part; part <= last_part; ++part) {
      float of_part[kTiles][4] = {};
#pragma unroll 1
      for (const int64_t behind = begin_of_part<W>(part + 1, num_slices) * kOfSlice; at < behind; at += kOfSlice) {
        // All that is not in the ring is on its way before that is waited for.
        const int64_t group = p.groups > 1 ? at / kOfSlice : 0;
        float low_scale = 1, high_scale = 1;
        if constexpr (kScaled) {
          const float* const of_weight =
              p.weight_scales + group * p.weight_rows() + (p.groups - 1) * item.expert * p.weight_rows() + lane / 4;
          low_scale = of_weight[rows.top], high_scale = of_weight[rows.bottom];
        }
        float of_x[kTiles][2];
        Neighbours<X, W> ahead[kTiles][2];
        if constexpr (kAhead) {
          if (at + kOfSlice < end) read(ahead, at + kOfSlice);
        } else {
          read(x, at);
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          if (n >= tiles) break;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int row = __shfl_sync(kFullMask, x_rows[n], (lane % 4 * 2 + e) * 4);
            of_x[n][e] = kIsFloat8<X> ? p.x_scales[group * p.x_scales_stride + row] : 1;
          }
        }
        asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 2) : "memory");
        __syncwarp();
        const unsigned char* const from = stages + stage * kSliceBytes + lane / 4 * kSlice;
        uint4 a[2][2];
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            a[u][half] = *reinterpret_cast<const uint4*>(from + half * 8 * kSlice +
                                                         ((u * 4 + lane % 4) ^ (lane / 4 % 2 * 4)) * 16);
        // The slice read before this one is everybody's no more.
        ring.fetch(stage == 0 ? kDepth - 1 : stage - 1);
        if (++stage == kDepth) stage = 0;

        float of_slice[kTiles][4] = {};
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int k = 0; k < kNumbers<W> / 4; ++k) {
            uint32_t numbers[4];
            if constexpr (kScaled) {
              widen<Number>(word_of(a[u][0], k), numbers[0], numbers[2]);
              widen<Number>(word_of(a[u][1], k), numbers[1], numbers[3]);
            } else {
#pragma unroll
              for (int w = 0; w < 4; ++w) numbers[w] = word_of(a[u][w % 2], 2 * k + w / 2);
            }
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              if (n >= tiles) break;
              uint32_t low, high;
              if constexpr (kIsFloat8<X>) {
                widen<Number>(word_of(x[n][u].packs[0], k), low, high);
              } else {
                low = word_of(x[n][u].packs[k / 2], k % 2 * 2);
                high = word_of(x[n][u].packs[k / 2], k % 2 * 2 + 1);
              }
              mma<Number>(kScaled ? of_slice[n] : of_part[n], numbers, low, high);
            }
          }
        if constexpr (kScaled) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              if (n < tiles) of_part[n][e] += of_slice[n][e] * (of_x[n][e % 2] * (e < 2 ? low_scale : high_scale));
        }
        if constexpr (kAhead) {
#pragma unroll
          for (int u = 0; u < 2; ++u) x[0][u] = ahead[0][u];
        }
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] += of_part[n][e];
    }

    if constexpr (kWarps > 1) {
      static_assert(kTiles == 1);
      __shared__ float4 sums[kWarps][kWarp];
      __syncthreads();  // those of the item before have been read
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
        const int64_t pair = __shfl_sync(kFullMask, pairs[n], column * 4);
        if (n * 8 + column >= item.count) continue;
        T* const to = static_cast<T*>(p.out) + pair * p.out_stride + int64_t{item.tile} * outs + lane / 4;
        const float top = sum[n][e], bottom = sum[n][2 + e];
        to[0] = from_float<T>(p.gated ? gated(top, bottom) : top);
        if (!p.gated) to[kTile / 2] = from_float<T>(bottom);
      }
  }
}

template <class X, class W, class T>
void start(const MoeGroupedGemmParams& p, Stream stream) {
  const int64_t multiprocessors = current_device("moe_grouped_gemm").num_sms;
  const auto most_items = [&](int columns) {
    const int64_t touched = std::min(p.experts, p.pairs);
    return p.weight_rows() / kTile * (touched + (p.pairs - touched) / columns);
  };
  const auto of_tiles = [&]<int kTiles, int kWarps>() {
    static_assert(kWarps == 1 || kWarps == kParts<W>);
    const auto kernel = moe_grouped_gemm_kernel<X, W, T, kTiles, kWarps>;
    constexpr int kRings = kWarps * kDepth * kSliceBytes;
    SD_CUDA_CHECK("moe_grouped_gemm", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                           kRings + int{kMaxExperts * sizeof(int)}));
    // As many blocks as find room at once, or one for each item there may be.
    const int64_t room = kMostWarps / kWarps * multiprocessors;
    launch("moe_grouped_gemm", kernel,
           {.grid = static_cast<unsigned>(std::min(room, most_items(kTiles * 8))),
            .threads = kWarps * kWarp,
            .shared_bytes = kRings + p.experts * sizeof(int)},
           stream, p);
  };
  if (p.rows > 8) return of_tiles.template operator()<kIsFloat8<W> ? 2 : 4, 1>();  // more take too many registers
  most_items(8) <= kMostWarps / 2 * multiprocessors ? of_tiles.template operator()<1, kParts<W>>()
                                                    : of_tiles.template operator()<1, 1>();
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
