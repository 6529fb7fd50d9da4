// tree_attention without tensor cores: for float32, and for rows that are not aligned to 16 bytes; pools may be FP8.
//
// A block computes 16 rows of one request and KV head, where row n is query row n / G, head n % G of its GQA group. It
// streams the KV visible to its rows in tiles of 64 (or 32) tokens through shared memory, with an online softmax in
// float32. A warp owns 4 rows; a lane owns 1 or 2 tokens of their scores, and head_dim / 32 columns of their outputs.
// No reduction crosses warps, and a row's arithmetic depends on nothing but its own request. Grid: (row tiles of all
// requests, kv_heads). Traffic: the KV of a request and head once per row tile.
#include <cutlass/fast_math.h>

#include "attention/common/launch.cuh"
#include "attention/plain/row_blocks.cuh"
#include "core/floats.h"

namespace specdec::attention {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 16;
constexpr int kRowsPerWarp = kRows / (kThreads / kWarp);

template <class Kv, int D>
struct Tile {
  // Two float32 tiles of 256 x 64 would not fit on devices with 100 KB of shared memory.
  static constexpr int kTokens = sizeof(Kv) * D >= 1024 ? 32 : 64;
  static constexpr int kVector = 16 / sizeof(Kv);  // elements of a 16-byte access
  // Elements from one token to the next, padded so that lanes on adjacent tokens hit different banks.
  static constexpr int kStride = D + kVector;
  static constexpr int kColumns = D / kWarp;  // columns of the output that a lane owns

  alignas(16) float q[kRows][D];  // scaled to log2 units
  alignas(16) Kv k[kTokens][kStride];
  alignas(16) Kv v[kTokens][kStride];
  alignas(16) float weights[kRows][kTokens];
  int64_t k_rows[2][kTokens];  // offsets of this and the next tile's tokens in the pools; -1: not present
  int64_t v_rows[2][kTokens];
};

// N elements that are loaded and stored as one vector.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T x[N];
};

// Copy a tile's tokens to shared memory, 16 bytes at a time if aligned, with zeros for tokens that are not present.
template <class Kv, int D>
__device__ __forceinline__ void load_tile(Tile<Kv, D>& s, const TreeAttentionParams& p, int buffer) {
  using Vector = Pack<Kv, Tile<Kv, D>::kVector>;
  constexpr int kPieces = D / Tile<Kv, D>::kVector;
  const Kv *k_pool = static_cast<const Kv*>(p.k_pool), *v_pool = static_cast<const Kv*>(p.v_pool);
#pragma unroll 4
  for (int n = threadIdx.x; n < Tile<Kv, D>::kTokens * kPieces; n += kThreads) {
    const int j = n / kPieces, d = n % kPieces * Tile<Kv, D>::kVector;
    const int64_t k_row = s.k_rows[buffer][j], v_row = s.v_rows[buffer][j];
    Vector k{}, v{};
    if (k_row >= 0) {
      if (p.aligned) {
        k = *reinterpret_cast<const Vector*>(k_pool + k_row + d);
        v = *reinterpret_cast<const Vector*>(v_pool + v_row + d);
      } else {
        for (int e = 0; e < Tile<Kv, D>::kVector; ++e) {
          k.x[e] = k_pool[k_row + d + e];
          v.x[e] = v_pool[v_row + d + e];
        }
      }
    }
    *reinterpret_cast<Vector*>(&s.k[j][d]) = k;
    *reinterpret_cast<Vector*>(&s.v[j][d]) = v;
  }
}

// Accumulate weights x values of the tile into a warp's rows. kPartial: some row does not attend to some token, whose
// value must not be read even with weight 0, since it may be NaN.
template <bool kPartial, class Kv, int D>
__device__ __forceinline__ void add_values(const Tile<Kv, D>& s, int row, int lane,
                                           float (&acc)[kRowsPerWarp][D / kWarp]) {
  constexpr int kColumns = Tile<Kv, D>::kColumns;
#pragma unroll 4
  for (int j = 0; j < Tile<Kv, D>::kTokens; ++j) {
    const auto values = *reinterpret_cast<const Pack<Kv, kColumns>*>(&s.v[j][lane * kColumns]);
#pragma unroll
    for (int a = 0; a < kRowsPerWarp; ++a) {
      const float weight = s.weights[row + a][j];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float value = to_float(values.x[c]);
        acc[a][c] = fmaf(weight, kPartial && weight == 0 ? 0.0f : value, acc[a][c]);
      }
    }
  }
}

template <class T, class Kv, int D>
__global__ void __launch_bounds__(kThreads) plain_kernel(TreeAttentionParams p, cutlass::FastDivmod page_size) {
  using Shared = Tile<Kv, D>;
  constexpr int kTokens = Shared::kTokens, kVector = Shared::kVector, kColumns = Shared::kColumns;
  constexpr int kLaneTokens = kTokens / kWarp;
  begin_kernel();
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);

  const auto [b, begin] = find_row_block(p, kRows, blockIdx.x);
  if (b < 0) return;
  const Request r = load_request(p, b);
  if (begin == 0 && blockIdx.y == 0 && threadIdx.x == 0 && r.status != 0) set_status(p.status, r.slot, r.status);

  const int64_t G = p.q_heads / p.kv_heads, head = blockIdx.y;
  const int64_t rows = min(r.rows * G - begin, int64_t{kRows});                    // to write
  const int64_t valid = min(r.valid_rows * G - begin, int64_t{kRows});             // to compute; may be negative
  const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp * kRowsPerWarp;  // row: the warp's first

  for (int n = threadIdx.x; n < kRows * D; n += kThreads) {
    const int64_t i = (begin + n / D) / G, h = head * G + (begin + n / D) % G;
    s.q[n / D][n % D] =
        n / D < valid
            ? to_float(static_cast<const T*>(p.q)[r.q_start + i * p.q_strides.row + h * p.q_strides.head + n % D]) *
                  p.log2_scale
            : 0.0f;
  }

  const int64_t kv_begin = valid > 0 ? visible_begin(p, r, begin / G) : 0;
  const int64_t end = valid > 0 ? visible_end(p, r, (begin + valid - 1) / G) : 0;
  const auto resolve_addresses = [&](int64_t first, int buffer) {
    const int j = threadIdx.x;
    if (j >= kTokens) return;
    int64_t k_row = -1, v_row = -1;
    if (first + j >= kv_begin && first + j < end) {
      const kv::KvRow at = find_row(p.rows, page_size, r.slot, first + j);
      if (at.bits == 0) {
        k_row = row_start(p.k_strides, at, head);
        v_row = row_start(p.v_strides, at, head);
      } else {
        set_status(p.status, r.slot, at.bits);
      }
    }
    s.k_rows[buffer][j] = k_row;
    s.v_rows[buffer][j] = v_row;
  };

  float acc[kRowsPerWarp][kColumns] = {}, max_score[kRowsPerWarp], sum[kRowsPerWarp] = {};
#pragma unroll
  for (int a = 0; a < kRowsPerWarp; ++a) max_score[a] = -INFINITY;

  // Tiles start at multiples of kTokens even with a window, so that no row depends on its neighbors.
  const int64_t kv_first = kv_begin / kTokens * kTokens;
  resolve_addresses(kv_first, 0);
  __syncthreads();
  int buffer = 0;
  for (int64_t first = kv_first; first < end; first += kTokens, buffer ^= 1) {
    load_tile(s, p, buffer);
    resolve_addresses(first + kTokens, buffer ^ 1);
    __syncthreads();
    if (row < valid) {  // warp-uniform
      float score[kRowsPerWarp][kLaneTokens] = {};
#pragma unroll 4
      for (int d = 0; d < D; d += kVector) {
        float k[kLaneTokens][kVector];
#pragma unroll
        for (int u = 0; u < kLaneTokens; ++u) {
          const auto piece = *reinterpret_cast<const Pack<Kv, kVector>*>(&s.k[lane + u * kWarp][d]);
#pragma unroll
          for (int e = 0; e < kVector; ++e) k[u][e] = to_float(piece.x[e]);
        }
#pragma unroll
        for (int a = 0; a < kRowsPerWarp; ++a) {
#pragma unroll
          for (int e = 0; e < kVector; e += 4) {
            const float4 q = *reinterpret_cast<const float4*>(&s.q[row + a][d + e]);
#pragma unroll
            for (int u = 0; u < kLaneTokens; ++u)
              score[a][u] = fmaf(q.x, k[u][e],
                                 fmaf(q.y, k[u][e + 1], fmaf(q.z, k[u][e + 2], fmaf(q.w, k[u][e + 3], score[a][u]))));
          }
        }
      }

      const bool partial = first + kTokens > r.prefix || p.window != INT64_MAX;
#pragma unroll
      for (int a = 0; a < kRowsPerWarp; ++a) {
        uint64_t visible = ~uint64_t{0};
        if (row + a >= valid)
          visible = 0;
        else if (partial)
          visible = visible_word(p, r, (begin + row + a) / G, first);
        float new_max = max_score[a];
#pragma unroll
        for (int u = 0; u < kLaneTokens; ++u) {
          const int j = lane + u * kWarp;
          if (p.soft_cap != 0) score[a][u] = p.soft_cap * tanhf(score[a][u] / p.soft_cap);
          if ((visible >> j & 1) == 0 || s.k_rows[buffer][j] < 0) score[a][u] = -INFINITY;
          new_max = fmaxf(new_max, score[a][u]);
        }
        for (int step = kWarp / 2; step > 0; step /= 2)
          new_max = fmaxf(new_max, __shfl_xor_sync(kFullMask, new_max, step));

        // Before any visible token: 2^(-inf - 0), not 2^(-inf + inf).
        const float origin = new_max > -INFINITY ? new_max : 0.0f;
        const float rescale = exp2f(max_score[a] - origin);
        max_score[a] = new_max;
        sum[a] *= rescale;
#pragma unroll
        for (int u = 0; u < kLaneTokens; ++u) {
          const float weight = exp2f(score[a][u] - origin);
          sum[a] += weight;
          s.weights[row + a][lane + u * kWarp] = weight;
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c) acc[a][c] *= rescale;
      }
      __syncwarp();
      if (partial)
        add_values<true>(s, row, lane, acc);
      else
        add_values<false>(s, row, lane, acc);
    }
    __syncthreads();  // before the next tile overwrites k, v and this tile's rows
  }

#pragma unroll
  for (int a = 0; a < kRowsPerWarp; ++a) {
    float total = sum[a];
    for (int step = kWarp / 2; step > 0; step /= 2) total += __shfl_xor_sync(kFullMask, total, step);
    if (row + a >= rows) continue;  // warp-uniform
    const int64_t i = (begin + row + a) / G, h = head * G + (begin + row + a) % G;
    T* out = static_cast<T*>(p.out) + r.out_start + i * p.out_strides.row + h * p.out_strides.head + lane * kColumns;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) out[c] = from_float<T>(total == 0 ? 0.0f : acc[a][c] / total * p.v_scale);
    if (p.lse != nullptr && lane == 0)
      p.lse[(r.flat_row + i) * p.q_heads + h] =
          total == 0 ? -INFINITY : (max_score[a] + log2f(total)) * 0.6931471805599453f;
  }
}

template <class T, class Kv, int D>
void launch_plain(const TreeAttentionParams& p, Stream stream) {
  const LaunchShape shape{
      .grid = dim3(grid_x("tree_attention", count_row_blocks(p, kRows)), static_cast<unsigned>(p.kv_heads)),
      .threads = kThreads,
      .shared_bytes = sizeof(Tile<Kv, D>)};
  allow_shared_bytes(plain_kernel<T, Kv, D>, shape.shared_bytes);
  launch("tree_attention", plain_kernel<T, Kv, D>, shape, stream, p,
         cutlass::FastDivmod(static_cast<int>(p.rows.page_size)));
}

}  // namespace

void plain_attention(const TreeAttentionParams& p, Stream stream) {
  with_types(
      p, [&]<class T, class Kv>() { with_head_dim(p.head_dim, [&]<int D>() { launch_plain<T, Kv, D>(p, stream); }); });
}

}  // namespace specdec::attention
