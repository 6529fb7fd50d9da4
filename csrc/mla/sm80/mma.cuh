// mla_tree_attention with mma.sync (compute capability 8.0 and later) for tiles of 16, 32 or 64 rows.
//
// A block computes one row tile of an item (work_item.cuh) over one split of its KV, in KV tiles of 32 latent rows. Its
// warps form kRowGroups x kParts: a row group has 16 rows; for scores its warps divide the tokens of a KV tile, for
// outputs the columns. They exchange row maxima and weights through shared memory, so each latent row is copied once
// and is both key and value there. Copies of the next tile (cp.async) overlap with the products of this one. Rows of 8
// bits arrive in a buffer of their own and are dequantized into the tile.
//
// Grid: row tiles x splits. The last block of a row tile to finish merges the partial results, in KV order. Traffic:
// the latent rows of a request once per row tile, most of it out of the L2 if there are several.
#pragma once

#include "attention/common/merge.cuh"
#include "core/copy_async.cuh"
#include "core/fragments.cuh"
#include "core/mma.cuh"
#include "mla/dequantize.cuh"
#include "mla/kernels.h"
#include "mla/work_item.cuh"

namespace specdec::mla {

// The splits of an item's KV: split s covers KV rows [begin(s), end(s)).
struct Splits {
  int count;  // 1 or more
  int first, length, kv_begin, kv_end;

  __device__ Splits(const MlaTreeAttentionParams& p, const WorkItem& item, int tile_tokens)
      : kv_begin(item.kv_begin), kv_end(item.kv_end) {
    if (p.fixed_split) {
      length = static_cast<int>(p.fixed_split);
      first = kv_begin / length;
      count = kv_end > kv_begin ? (kv_end - 1) / length - first + 1 : 1;
      return;
    }
    const int tiles = kv_end > kv_begin ? (kv_end - 1) / tile_tokens - kv_begin / tile_tokens + 1 : 0;
    const int wanted = clamp_to(tiles * tile_tokens / static_cast<int>(kMinSplitTokens), 1, p.plan.splits);
    const int each = max((tiles + wanted - 1) / wanted, 1);
    length = each * tile_tokens;
    first = 0;
    kv_origin = kv_begin / tile_tokens * tile_tokens;
    count = max((tiles + each - 1) / each, 1);
  }
  __device__ int begin(int s) const { return max(kv_origin + (first + s) * length, kv_begin); }
  __device__ int end(int s) const {
    return static_cast<int>(min(int64_t{kv_origin} + int64_t{first + s + 1} * length, int64_t{kv_end}));
  }

 private:
  int kv_origin = 0;
};

// T: type of queries and outputs. Row: that of the pool's elements, or Row656.
template <class T, class Row, int kRows_>
class MlaMma {
 public:
  static constexpr int kRows = kRows_, kTokens = 32;
  static constexpr bool kDequantize = !std::is_same_v<T, Row>;
  static constexpr int kStages = kDequantize ? 1 : 2;
  static constexpr int kWarps = kRows == 16 ? 4 : 8, kThreads = kWarps * kWarp;
  static constexpr int kBlocksPerSm = kRows == 64 ? 1 : 2;
  static constexpr int kRowGroups = kRows / 16, kParts = kWarps / kRowGroups;
  static constexpr int kMyTokens = kTokens / kParts, kMyColumns = static_cast<int>(kMaxLatent) / kParts;
  // Rows in shared memory are 16 bytes longer than latent rows and weights are, which keeps the banks of adjacent rows
  // apart without a swizzle: addresses in unrolled loops are a base plus a constant.
  static constexpr int kStride = static_cast<int>(kMaxWidth) * 2 + 16;  // bytes
  static constexpr int kWeightStride = kTokens + 8;                     // elements
  static constexpr int kMaxPieces = static_cast<int>(kMaxWidth) * 2 / 16;
  static constexpr int kRawBytes = std::is_same_v<Row, Row656> ? Row656::kBytes : static_cast<int>(kMaxWidth);
  static constexpr float kRescaleThreshold = 8;  // weights up to 2^8 are harmless
  static_assert(kMyTokens % 8 == 0 && kMyColumns % 16 == 0);

  struct Shared {
    alignas(128) unsigned char q[kRows * kStride];
    alignas(128) unsigned char tiles[kStages][kTokens * kStride];
    alignas(16) unsigned char raw[kDequantize ? kTokens * kRawBytes : 16];
    alignas(16) T weights[kRows * kWeightStride];
    const char* rows[2][kTokens];  // of this and the next tile; null: not present
    uint32_t present[2];
    bool is_last;

    // Return where the warps of a row group exchange a value each about a row, in the 16 bytes after its weights:
    // maxima in a tile; at the end sums of weights.
    __device__ float* exchange(int row) {
      static_assert(kParts <= 4);
      return reinterpret_cast<float*>(weights + row * kWeightStride + kTokens);
    }
  };

  __device__ static void run(Shared& s, const MlaTreeAttentionParams& p, const cutlass::FastDivmod& page_size) {
    const WorkItem item = find_item(p, kRows, blockIdx.x);
    if (item.count == 0) return;
    const Splits splits(p, item, kTokens);
    if (static_cast<int>(blockIdx.y) >= splits.count) return;
    load_queries(s, p, item);
#pragma unroll 1
    for (int split = blockIdx.y; split < splits.count; split += gridDim.y) {
      Block block(s, p, item, page_size);
      block.attend(splits.begin(split), splits.end(split));
      if (splits.count == 1) return block.write_out();
      block.write_partial(split);
      if (!count_arrival(s, p, splits.count)) continue;
      merge(p, item, splits.count);
    }
  }

 private:
  // Start to copy the queries, with zeros for rows that do not attend.
  __device__ static void load_queries(Shared& s, const MlaTreeAttentionParams& p, const WorkItem& item) {
    const Request& r = item.request;
    const int heads = static_cast<int>(p.q_heads);
    for (int n = threadIdx.x / kWarp; n < kRows; n += kWarps) {
      const int i = (item.begin + n) / heads, h = (item.begin + n) % heads;
      const bool valid = n < item.valid;
      const T* const from =
          static_cast<const T*>(p.q) + (valid ? r.q_start + i * p.q_strides.row + h * p.q_strides.head : 0);
      copy_row(s.q + n * kStride, reinterpret_cast<const char*>(from), static_cast<int>(p.width) / 8, valid);
    }
  }

  // Start to copy a row of 16-byte pieces, or to write zeros; called by one warp.
  __device__ __forceinline__ static void copy_row(unsigned char* to, const char* from, int pieces, bool copies) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int c = 0; c < kMaxPieces; c += kWarp)
      if (c + lane < pieces) copy_async_or_zeros(to + 16 * (c + lane), from + 16 * (c + lane), copies);
  }

  // Return where the partial result of a split of this block's row tile begins.
  __device__ static float* partial_of(const MlaTreeAttentionParams& p, int split) {
    const int64_t counters = (int64_t{gridDim.x} + 1) / 2 * 2;  // of 8 bytes
    return p.workspace + 2 * counters +
           (int64_t{blockIdx.x} * p.plan.splits + split) * partial_floats(kRows, p.latent_dim);
  }

  // Count this block's partial result; return whether it was the last of its row tile. Call from all threads.
  __device__ static bool count_arrival(Shared& s, const MlaTreeAttentionParams& p, int count) {
    __syncthreads();
    if (threadIdx.x == 0) {
      attention::PartialsCounter counter(reinterpret_cast<uint64_t*>(p.workspace) + blockIdx.x, count);
      s.is_last = counter.arrive_and_check_last();
    }
    __syncthreads();
    return s.is_last;
  }

  // Merge the partial results of a row tile in KV order, a warp per row.
  __device__ static void merge(const MlaTreeAttentionParams& p, const WorkItem& item, int count) {
    using Partial = attention::PartialRow<kMaxLatent>;
    const int latent = static_cast<int>(p.latent_dim), lane = threadIdx.x % kWarp;
#pragma unroll 1
    for (int row = threadIdx.x / kWarp; row < item.count; row += kWarps) {
      Partial sum;
#pragma unroll 1
      for (int split = 0; split < count; ++split) {
        const float* partial = partial_of(p, split);
        Partial next;
#pragma unroll
        for (int v = 0; v < Partial::kVectors; ++v) {
          const int column = 4 * lane + 128 * v;
          if (column < latent) next.x[v] = __ldcg(reinterpret_cast<const float4*>(partial + row * latent + column));
        }
        next.row_max = __ldcg(partial + kRows * latent + row);
        next.row_sum = __ldcg(partial + kRows * latent + kRows + row);
        sum.add(next);
      }
      sum.scale(sum.row_sum == 0 ? 0 : p.v_scale / sum.row_sum);
      const attention::QueryRow at = query_row(p, item, row);
#pragma unroll
      for (int v = 0; v < Partial::kVectors; ++v)
        if (4 * lane + 128 * v < latent) attention::store_out<T>(p, item.request, at, 4 * lane + 128 * v, sum.x[v]);
      if (lane == 0) attention::store_lse(p, item.request, at, sum.row_max, sum.row_sum);
    }
  }

  __device__ static attention::QueryRow query_row(const MlaTreeAttentionParams& p, const WorkItem& item, int n) {
    const int heads = static_cast<int>(p.q_heads);
    return {(item.begin + n) / heads, (item.begin + n) % heads};
  }

  // State of one thread over a split. A lane has rows lane / 4 and + 8 of its row group, as in the C fragment of mma.
  struct Block {
    Shared& s;
    const MlaTreeAttentionParams& p;
    const WorkItem& item;
    const cutlass::FastDivmod& page_size;
    const int lane = threadIdx.x % kWarp, group = threadIdx.x / kWarp % kRowGroups;
    const int part = threadIdx.x / kWarp / kRowGroups;
    const int row = group * 16 + lane / 4;  // first of this lane's two rows
    float out[kMyColumns / 8][4] = {};
    float max[2] = {-INFINITY, -INFINITY};  // of the scores so far, in log2 units
    float sum[2] = {};                      // of this lane's weights

    __device__ Block(Shared& s, const MlaTreeAttentionParams& p, const WorkItem& item,
                     const cutlass::FastDivmod& page_size)
        : s(s), p(p), item(item), page_size(page_size) {}

    // Attend from all rows to KV rows [begin, end). Tiles begin at multiples of kTokens.
    __device__ __forceinline__ void attend(int begin, int end) {
      const int origin = begin / kTokens * kTokens;
      __syncthreads();  // a split before this one has been written
      if (threadIdx.x < kWarp) {
        look_up(0, origin, begin, end);
        if (origin + kTokens < end) look_up(1, origin + kTokens, begin, end);
      }
      __syncthreads();
      if (origin < end) copy_tile(0, 0);
      int buffer = 0;
#pragma unroll 1
      for (int first = origin; first < end; first += kTokens, buffer ^= 1) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();  // the tile has arrived, and the one before has been multiplied
        if constexpr (kDequantize) {
          dequantize();
          __syncthreads();
        }
        if (first + kTokens < end) copy_tile(buffer ^ 1, buffer ^ 1);
        const unsigned char* const tile = s.tiles[kDequantize ? 0 : buffer];
        float scores[kMyTokens / 8][4];
        multiply_qk(tile, scores);
        mask(first, buffer, scores);
        exchange_maxima(scores);
        __syncthreads();
        if (threadIdx.x < kWarp && first + 2 * kTokens < end) look_up(buffer, first + 2 * kTokens, begin, end);
        add_weights(scores);
        __syncthreads();
        multiply_pv(tile);
      }
      finish();
    }

    // Find the latent rows of the tile that begins at KV row `first`. A row that no row of the item sees may never have
    // been written: it is not read. Call from one warp.
    __device__ __forceinline__ void look_up(int buffer, int first, int begin, int end) {
      const int k = first + lane;
      const char* address = k >= begin && k < end ? find_latent_row(p, item, page_size, k) : nullptr;
      if (needs_mask(p, item, first, kTokens) && item.valid > 0) {
        const int heads = static_cast<int>(p.q_heads), last = (item.begin + item.valid - 1) / heads;
        uint32_t seen = 0;
#pragma unroll 1
        for (int i = item.begin / heads + lane; i <= last; i += kWarp)
          seen |= static_cast<uint32_t>(visible_word(p, item.request, i, first));
        if ((__reduce_or_sync(kFullMask, seen) >> lane & 1) == 0) address = nullptr;
      }
      s.rows[buffer][lane] = address;
      const uint32_t present = __ballot_sync(kFullMask, address != nullptr);
      if (lane == 0) s.present[buffer] = present;
    }

    // Start to copy a tile, with zeros for rows that are not present.
    __device__ __forceinline__ void copy_tile(int buffer, int stage) {
      const int pieces = std::is_same_v<Row, Row656> ? Row656::kBytes / 16
                         : kDequantize               ? static_cast<int>(p.width) / 16
                                                     : static_cast<int>(p.width) / 8;
#pragma unroll 4
      for (int j = threadIdx.x / kWarp; j < kTokens; j += kWarps) {
        const char* const from = s.rows[buffer][j];
        unsigned char* const to = kDequantize ? s.raw + j * kRawBytes : s.tiles[stage] + j * kStride;
        copy_row(to, from == nullptr ? p.kv_pool : from, pieces, from != nullptr);
      }
    }

    // Dequantize the tile that has arrived, 16 elements at a time. A missing row is zeros, its factors included.
    __device__ __forceinline__ void dequantize() {
      constexpr bool k656 = std::is_same_v<Row, Row656>;
      const int pieces = k656 ? Row656::kLatent / 16 : static_cast<int>(p.width) / 16;
      for (int j = threadIdx.x / kWarp; j < kTokens; j += kWarps) {
        const unsigned char* raw = s.raw + j * kRawBytes;
        unsigned char* const to = s.tiles[0] + j * kStride;
        for (int c = lane; c < pieces; c += kWarp) {
          const uint4 x = *reinterpret_cast<const uint4*>(raw + 16 * c);
          float factor = 1;
          if constexpr (k656) factor = reinterpret_cast<const float*>(raw + Row656::kScales)[c * 16 / Row656::kGroup];
          uint4 y[2];
          specdec::mla::dequantize<T>(x, factor, y);
          *reinterpret_cast<uint4*>(to + 32 * c) = y[0];
          *reinterpret_cast<uint4*>(to + 32 * c + 16) = y[1];
        }
        if constexpr (k656)
          if (lane < Row656::kRope / 8)
            *reinterpret_cast<uint4*>(to + Row656::kLatent * 2 + 16 * lane) =
                *reinterpret_cast<const uint4*>(raw + Row656::kRopeBytes + 16 * lane);
      }
    }

    // Multiply this row group's queries by this warp's tokens.
    __device__ __forceinline__ void multiply_qk(const unsigned char* tile, float (&scores)[kMyTokens / 8][4]) {
      constexpr int kAtOnce = 4, kChains = kMyTokens == 8 ? 2 : 1;  // chains: sums that do not wait for each other
      float sums[kChains][kMyTokens / 8][4] = {};
      const int steps = static_cast<int>(p.width) / 16;
      const unsigned char* const queries = s.q + (group * 16 + lane % 16) * kStride + lane / 16 * 16;
      const int token = part * kMyTokens + (kMyTokens == 8 ? lane % 8 : lane / 16 * 8 + lane % 8);
      const unsigned char* const keys = tile + token * kStride + lane / 8 % 2 * 16;
#pragma unroll 1
      for (int first = 0; first < steps; first += kAtOnce) {
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          if (first + n >= steps) break;
          const int at = 32 * first + 32 * n;
          auto& sum = sums[n % kChains];
          uint32_t a[4];
          load_matrices(a, queries + at);
          if constexpr (kMyTokens == 8) {
            uint32_t b[2];
            load_matrices(b, keys + at);
            specdec::mma<T>(sum[0], a, b[0], b[1]);
          } else {
            static_assert(kMyTokens <= 16);
            uint32_t b[4];
            load_matrices(b, keys + at);
            specdec::mma<T>(sum[0], a, b[0], b[1]);
            specdec::mma<T>(sum[1], a, b[2], b[3]);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kMyTokens / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[n][e] = sums[0][n][e];
          if (kChains > 1) scores[n][e] += sums[kChains - 1][n][e];
        }
    }

    // Scale this lane's scores to log2 units, and set those of tokens that its rows do not see to -inf.
    __device__ __forceinline__ void mask(int first, int buffer, float (&scores)[kMyTokens / 8][4]) {
      uint32_t visible[2] = {s.present[buffer], s.present[buffer]};
      if (needs_mask(p, item, first, kTokens) && item.valid > 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          visible[h] &= static_cast<uint32_t>(visible_to_row(p, item, min(row + 8 * h, item.valid - 1), first));
      }
      const int column = part * kMyTokens + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kMyTokens / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          scores[n][e] = visible[e / 2] >> (column + 8 * n + e % 2) & 1 ? scores[n][e] * p.log2_scale : -INFINITY;
    }

    // Publish the maxima of this warp's scores, which the other warps of the row group need.
    __device__ __forceinline__ void exchange_maxima(const float (&scores)[kMyTokens / 8][4]) {
      float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int n = 0; n < kMyTokens / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) most[e / 2] = fmaxf(most[e / 2], scores[n][e]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        most[h] = fmaxf(most[h], __shfl_xor_sync(kFullMask, most[h], 1));
        most[h] = fmaxf(most[h], __shfl_xor_sync(kFullMask, most[h], 2));
        if (lane % 4 == 0) s.exchange(row + 8 * h)[part] = most[h];
      }
    }

    // Turn scores into weights relative to the row's maximum, which all warps of the row group compute alike.
    __device__ __forceinline__ void add_weights(float (&scores)[kMyTokens / 8][4]) {
      float factor[2] = {1, 1};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* const maxima = s.exchange(row + 8 * h);
        float most = maxima[0];
#pragma unroll
        for (int other = 1; other < kParts; ++other) most = fmaxf(most, maxima[other]);
        if (most > max[h] + kRescaleThreshold) {
          factor[h] = attention::exp2_fast(max[h] - most);
          max[h] = most;
          sum[h] *= factor[h];
        }
        // Before any visible token: 2^(-inf - 0), not 2^(-inf + inf).
        const float origin = max[h] == -INFINITY ? 0 : max[h];
#pragma unroll
        for (int n = 0; n < kMyTokens / 8; ++n) {
          const float x = attention::exp2_fast(scores[n][2 * h] - origin);
          const float y = attention::exp2_fast(scores[n][2 * h + 1] - origin);
          sum[h] += x + y;
          const int column = part * kMyTokens + 8 * n + lane % 4 * 2;
          *reinterpret_cast<uint32_t*>(s.weights + (row + 8 * h) * kWeightStride + column) = attention::pack<T>(x, y);
        }
      }
      if (__any_sync(kFullMask, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
        for (auto& x : out)
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] *= factor[e / 2];
      }
    }

    // Add weights x latent rows to this warp's columns.
    __device__ __forceinline__ void multiply_pv(const unsigned char* tile) {
      const int first_column = part * kMyColumns, latent = static_cast<int>(p.latent_dim);
      const T* const weights = s.weights + (group * 16 + lane % 16) * kWeightStride + lane / 16 * 8;
      const unsigned char* const values = tile + lane % 16 * kStride + first_column * 2 + lane / 16 * 16;
#pragma unroll
      for (int k = 0; k < kTokens / 16; ++k) {
        uint32_t a[4];
        load_matrices(a, weights + 16 * k);
#pragma unroll
        for (int n = 0; n < kMyColumns / 16; ++n) {
          if (first_column + 16 * n >= latent) continue;  // warp-uniform
          uint32_t b[4];
          load_transposed_matrices(b, values + 16 * k * kStride + 32 * n);
          specdec::mma<T>(out[2 * n], a, b[0], b[1]);
          specdec::mma<T>(out[2 * n + 1], a, b[2], b[3]);
        }
      }
    }

    // Reduce the sums of weights over the lanes and warps of a row.
    __device__ __forceinline__ void finish() {
      __syncthreads();  // the maxima have been read
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] += __shfl_xor_sync(kFullMask, sum[h], 1);
        sum[h] += __shfl_xor_sync(kFullMask, sum[h], 2);
        if (lane % 4 == 0) s.exchange(row + 8 * h)[part] = sum[h];
      }
      __syncthreads();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] = 0;
#pragma unroll
        for (int other = 0; other < kParts; ++other) sum[h] += s.exchange(row + 8 * h)[other];
      }
    }

    // Call f(h, column, x, y) with this lane's pairs of adjacent columns of rows row + 8 h.
    template <class F>
    __device__ __forceinline__ void each_pair(F&& f) const {
      const int first_column = part * kMyColumns + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kMyColumns / 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (part * kMyColumns + 8 * n < p.latent_dim) f(h, first_column + 8 * n, out[n][2 * h], out[n][2 * h + 1]);
    }

    __device__ __forceinline__ void write_out() const {
      const Request& r = item.request;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int n = row + 8 * h;
        if (n >= item.count) continue;
        const attention::QueryRow at = query_row(p, item, n);
        const bool is_empty = n >= item.valid || sum[h] == 0;
        const float factor = is_empty ? 0 : p.v_scale / sum[h];
        T* to = static_cast<T*>(p.out) + r.out_start + at.row * p.out_strides.row + at.head * p.out_strides.head;
        each_pair([&](int half, int column, float x, float y) {
          if (half == h)
            *reinterpret_cast<uint32_t*>(to + column) = is_empty ? 0 : attention::pack<T>(x * factor, y * factor);
        });
        if (part == 0 && lane % 4 == 0) attention::store_lse(p, r, at, max[h], is_empty ? 0 : sum[h]);
      }
    }

    __device__ __forceinline__ void write_partial(int split) const {
      float* partial = partial_of(p, split);
      const int latent = static_cast<int>(p.latent_dim);
      each_pair([&](int h, int column, float x, float y) {
        *reinterpret_cast<float2*>(partial + (row + 8 * h) * latent + column) = make_float2(x, y);
      });
      if (part == 0 && lane % 4 == 0)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const bool valid = row + 8 * h < item.valid;
          partial[kRows * latent + row + 8 * h] = valid ? max[h] : -INFINITY;
          partial[kRows * latent + kRows + row + 8 * h] = valid ? sum[h] : 0;
        }
    }
  };
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerSm)
    mla_mma_kernel(const __grid_constant__ MlaTreeAttentionParams p,
                   const __grid_constant__ cutlass::FastDivmod page_size) {
  begin_kernel();
  extern __shared__ __align__(128) unsigned char memory[];
  Kernel::run(*reinterpret_cast<typename Kernel::Shared*>(memory), p, page_size);
}

template <class T, class Row, int kRows>
void launch_mma(const MlaTreeAttentionParams& p, Stream stream) {
  using Kernel = MlaMma<T, Row, kRows>;
  // largest_tile_sm80() counts on it.
  static_assert(sizeof(typename Kernel::Shared) <= (kRows == 64 ? 156 : kRows == 32 ? 116 : 96) * 1024);
  const LaunchShape shape{.grid = dim3(grid_x("mla_tree_attention", count_items(p, kRows)),
                                       static_cast<unsigned>(std::min<int64_t>(p.plan.splits, kMaxGridY))),
                          .threads = Kernel::kThreads,
                          .shared_bytes = sizeof(typename Kernel::Shared)};
  SD_CUDA_CHECK("mla_tree_attention",
                cudaFuncSetAttribute(mla_mma_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(shape.shared_bytes)));
  launch("mla_tree_attention", mla_mma_kernel<Kernel>, shape, stream, p,
         cutlass::FastDivmod(static_cast<int>(p.rows.page_size)));
}

// Instantiated by instantiations/, one file per format of rows, so that they compile in parallel.
template <class T, class Row>
void launch_mma_tile(const MlaTreeAttentionParams& p, Stream stream) {
  if (p.plan.tile_rows == 16) return launch_mma<T, Row, 16>(p, stream);
  if (p.plan.tile_rows == 32) return launch_mma<T, Row, 32>(p, stream);
  launch_mma<T, Row, 64>(p, stream);
}

}  // namespace specdec::mla
