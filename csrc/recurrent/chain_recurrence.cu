// Run a recurrence over chains of bfloat16 rows on tensor cores: prefill.
//
// One block per request, value head and slice of 32 values, which goes through chunks of 32 rows. With the matrices A
// (strictly lower: beta_i e^{G_i - G_j} k_i . k_j) and P (lower: e^{G_i - G_j} q_i . k_j) of a chunk, and S0 before it,
//
//   U = (I + A)^-1 beta (V - e^G K S0^T)     O = e^G Q S0^T + P U     S = e^{G_last} S0 + U^T (e^{G_last - G} K)
//
// All but S0 is known in advance: four warps load the rows of the chunk after the next one, and compute factors of
// rows, P and (I + A)^-1 of the next one, while the other four do what depends on the state. So the chain of dependent
// work per chunk is: products with S0, an exchange between two warps, U, and the new state.
//
// The state is in registers, as accumulators of mma.sync: a warp has 16 values and half of the channels. Accumulators
// have the layout of the next product's operand A, so no state and no U goes through shared memory. Rows stay bfloat16
// as they came, and all factors (normalization, scale, beta, decays) are applied to sums. What is float32 is split into
// bfloat16 values: the state, U and (I + A)^-1 into three, which hold all bits; two where only outputs depend on it.
#include "core/copy_async.cuh"
#include "core/fragments.cuh"
#include "core/mma.cuh"
#include "core/warp.cuh"
#include "recurrent/block_path.cuh"
#include "recurrent/chain_recurrence.h"
#include "recurrent/float4.cuh"

namespace specdec::recurrent {
namespace {

constexpr int kRows = 32;                               // of a chunk
constexpr int kValues = 32;                             // of a block
constexpr int kTiles = kRows / 8, kSteps = kRows / 16;  // of rows, as columns and as the inner dimension of a product
constexpr int kSideThreads = 128, kSideWarps = 4;       // of the warps with the state, and of those that prepare chunks
constexpr int kThreads = 2 * kSideThreads;
constexpr int kStages = 3;      // chunks of rows: in use, being prepared, under way
constexpr int kPadding = 8;     // bfloat16 values after a row, so that ldmatrix reads different banks
constexpr int kPreparing = 1;   // barriers: of the warps that prepare chunks,
constexpr int kExchanging = 2;  // and of two warps with the same values (2 and 3)

// Split two floats into kPieces bfloat16 values each, the first with the highest bits; three hold all bits.
template <int kPieces>
__device__ __forceinline__ void split(uint32_t (&pieces)[kPieces], float x, float y) {
#pragma unroll
  for (uint32_t& piece : pieces) {
    piece = bfloat16_pair(x, y);
    x -= low_of_pair(piece);
    y -= high_of_pair(piece);
  }
}

// Operand A in pieces: 16 values by 16 rows or channels.
template <int kPieces>
struct Operand {
  uint32_t of[kPieces][4];

  // Take accumulators: `low` has columns 0 to 7, `high` the next 8.
  __device__ void take(const float (&low)[4], const float (&high)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float (&from)[4] = e < 2 ? low : high;
      uint32_t pieces[kPieces];
      split(pieces, from[e % 2 * 2], from[e % 2 * 2 + 1]);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) of[piece][e] = pieces[piece];
    }
  }
};

// Rows of a chunk: 0 beyond key_dim and value_dim, and after the last row.
template <int kDim>
struct Rows {
  BFloat16 k[kRows][kDim + kPadding], q[kRows][kDim + kPadding];
  BFloat16 v[kRows][kValues + kPadding];
  float g[kRows], beta[kRows];
};

// The results of a chunk's rows without the state. Factors of the diagonal are in the matrices.
struct Prepared {
  BFloat16 inverse[3][kRows][kRows + kPadding];  // (I + A)^-1
  BFloat16 p[2][kRows][kRows + kPadding];        // the upper right quarter is not written
  float of_k[kRows], of_q[kRows];                // beta e^G, e^G and the factors of keys and queries
  float of_v[kRows];                             // beta
  float to_end[kRows];                           // e^{G_last - G} and the factor of keys
  alignas(16) float decay;                       // e^{G_last}
};

template <int kDim>
struct Shared {
  Rows<kDim> rows[kStages];
  Prepared prepared[2];
  float partial[kSideWarps][kTiles * 4 + kTiles * 2][kWarp];  // sums over half of the channels
  float a[kRows][kRows + 4];                                  // A transposed, where it is not 0
  float k_factor[kRows], q_factor[kRows], g[kRows];           // of the chunk that is prepared; g: sums
  BFloat16 out[2][kRows][kValues + kPadding];
};

// A block's request, head and values.
struct Block {
  Request request;
  int64_t h, key_head;
  int first_value;
};

__device__ __forceinline__ const BFloat16* row_of(const void* rows, const HeadStrides& strides, int64_t row,
                                                  int64_t head) {
  return static_cast<const BFloat16*>(rows) + row * strides.row + head * strides.head;
}

// Return the address, for ldmatrix, of a lane's row of the 16 x 16 block whose first element is `from`. The order of
// the matrices suits operand B for 16 columns (rows of the block), by_rows that of operand A, or B transposed.
template <int kStride>
__device__ __forceinline__ const BFloat16* block_row(const BFloat16* from, bool by_rows) {
  const int lane = lane_id(), second = lane / 8 % 2, fourth = lane / 16;
  return from + (lane % 8 + (by_rows ? second : fourth) * 8) * kStride + (by_rows ? fourth : second) * 8;
}

// The four warps that load rows and prepare chunks.
template <int kDim, bool kDelta>
struct Preparer {
  const TreeRecurrenceParams& p;
  const Block& block;
  Shared<kDim>& shared;
  int thread, warp;

  __device__ static void sync() { sync_threads<kPreparing, kSideThreads>(); }

  // Start to load the rows of a chunk, if there is one; ends a group of copies.
  __device__ void load(int chunk) const {
    const int first = chunk * kRows, count = block.request.rows - first;
    if (count > 0) {
      Rows<kDim>& to = shared.rows[chunk % kStages];
      const int64_t row = block.request.first + first;
      constexpr int kPerRow = kDim / 8;
#pragma unroll
      for (int n = 0; n < kRows * kPerRow / kSideThreads; ++n) {
        const int i = (thread + n * kSideThreads) / kPerRow, d = (thread + n * kSideThreads) % kPerRow * 8;
        const bool copies = i < count && d < p.layer.key_dim;
        const int64_t from = copies ? row + i : row;
        const int offset = copies ? d : 0;
        copy_async_or_zeros(static_cast<void*>(&to.k[i][d]), row_of(p.k, p.k_strides, from, block.key_head) + offset,
                            copies);
        copy_async_or_zeros(static_cast<void*>(&to.q[i][d]), row_of(p.q, p.q_strides, from, block.key_head) + offset,
                            copies);
      }
      constexpr int kValuePerRow = kValues / 8;
      static_assert(kRows * kValuePerRow == kSideThreads);
      const int i = thread / kValuePerRow, d = thread % kValuePerRow * 8;
      const bool copies = i < count && block.first_value + d < p.layer.value_dim;
      copy_async_or_zeros(
          static_cast<void*>(&to.v[i][d]),
          row_of(p.v, p.v_strides, copies ? row + i : row, block.h) + (copies ? block.first_value + d : 0), copies);
      if (thread < kRows) {
        const int64_t from = thread < count ? row + thread : row;
        copy_async_or_zeros(&to.g[thread], p.g + from * p.g_strides.row + block.h * p.g_strides.head, thread < count);
        if (p.beta != nullptr)
          copy_async_or_zeros(&to.beta[thread], p.beta + from * p.beta_stride + block.h, thread < count);
      }
    }
    commit_copies();
  }

  // Return the sum of squares of a row. Each of 4 lanes has a quarter of it, and all receive the sum.
  __device__ static float square_sum(const BFloat16* row) {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < kDim / 32; ++c) {
      const uint4 eight = *reinterpret_cast<const uint4*>(row + 8 * (lane_id() % 4 + 4 * c));
#pragma unroll
      for (const uint32_t pair : {eight.x, eight.y, eight.z, eight.w}) {
        const float low = low_of_pair(pair), high = high_of_pair(pair);
        sum += low * low + high * high;
      }
    }
    sum += __shfl_xor_sync(kFullMask, sum, 1);
    return sum + __shfl_xor_sync(kFullMask, sum, 2);
  }

  // Compute the factors of the rows' keys and queries, and sum the decays.
  __device__ void normalize(const Rows<kDim>& rows) const {
    const int i = 8 * warp + lane_id() / 4;
    float k_factor = 1, q_factor = p.scale;
    if (p.normalizes) {
      k_factor /= sqrtf(square_sum(rows.k[i]) + p.l2norm_eps);
      q_factor /= sqrtf(square_sum(rows.q[i]) + p.l2norm_eps);
    }
    if (lane_id() % 4 == 0) {
      shared.k_factor[i] = k_factor;
      shared.q_factor[i] = q_factor;
    }
    if (warp == 0) shared.g[lane_id()] = sum_up_to_lane(rows.g[lane_id()]);
  }

  // Compute A and P. Two warps have keys, two queries, one of them the first 16 rows and the other the rest.
  __device__ void multiply_pairs(const Rows<kDim>& rows, Prepared& to) const {
    const bool of_queries = warp >= 2;
    const int first = warp % 2 * 16;
    if (!kDelta && !of_queries) return;
    float sums[kTiles][4] = {};
    const auto& from = of_queries ? rows.q : rows.k;
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      uint32_t a[4], b[4];
      load_matrices(a, block_row<kDim + kPadding>(&from[first][d], true));
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        if (8 * j > first) break;
        load_matrices(b, block_row<kDim + kPadding>(&rows.k[8 * j][d], false));
        mma<BFloat16>(sums[j], a, b[0], b[1]);
        mma<BFloat16>(sums[j + 1], a, b[2], b[3]);
      }
    }
    const int group = lane_id() / 4, two = lane_id() % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (8 * tile >= first + 16) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = first + group + 8 * half, j = 8 * tile + two;
        const float factor = of_queries ? shared.q_factor[i] : kDelta ? rows.beta[i] * shared.k_factor[i] : 0;
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool is_seen = of_queries ? j + e <= i : j + e < i;
          pair[e] =
              is_seen ? sums[tile][2 * half + e] * factor * shared.k_factor[j + e] * decay(shared.g[i], shared.g[j + e])
                      : 0;
        }
        if (of_queries) {
          uint32_t pieces[2];
          split(pieces, pair[0], pair[1]);
#pragma unroll
          for (int piece = 0; piece < 2; ++piece) *reinterpret_cast<uint32_t*>(&to.p[piece][i][j]) = pieces[piece];
        } else {
          shared.a[j][i] = pair[0];
          shared.a[j + 1][i] = pair[1];
        }
      }
    }
  }

  // Compute the factors of rows; one warp.
  __device__ void weigh_rows(const Rows<kDim>& rows, Prepared& to) const {
    const int i = lane_id();
    const float g = shared.g[i], last = shared.g[kRows - 1], beta = p.beta != nullptr ? rows.beta[i] : 1;
    to.of_k[i] = beta * expf(g) * shared.k_factor[i];
    to.of_q[i] = expf(g) * shared.q_factor[i];
    to.of_v[i] = beta;
    to.to_end[i] = decay(last, g) * shared.k_factor[i];
    if (i == 0) to.decay = expf(last);
  }

  // Compute (I + A)^-1 by forward substitution, a column per lane; one warp.
  __device__ void invert(Prepared& to) const {
    const int column = lane_id();
    float x[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) x[i] = i == column ? 1 : 0;
#pragma unroll
    for (int j = 0; j < kRows - 1; ++j) {
#pragma unroll
      for (int i = (j + 1) / 4 * 4; i < kRows; i += 4) {
        const float4 a = *reinterpret_cast<const float4*>(&shared.a[j][i]);
        if (i > j) x[i] -= a.x * x[j];
        if (i + 1 > j) x[i + 1] -= a.y * x[j];
        if (i + 2 > j) x[i + 2] -= a.z * x[j];
        if (i + 3 > j) x[i + 3] -= a.w * x[j];
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; i += 2) {
      uint32_t pieces[3];
      split(pieces, x[i], x[i + 1]);
#pragma unroll
      for (int piece = 0; piece < 3; ++piece) {
        to.inverse[piece][i][column].bits = static_cast<uint16_t>(pieces[piece]);
        to.inverse[piece][i + 1][column].bits = static_cast<uint16_t>(pieces[piece] >> 16);
      }
    }
  }

  // Prepare a chunk, and start to load the next one.
  __device__ void prepare(int chunk) const {
    load(chunk + 1);
    wait_for_copies<1>();
    sync();  // the chunk's rows are loaded
    const Rows<kDim>& rows = shared.rows[chunk % kStages];
    Prepared& to = shared.prepared[chunk % 2];
    normalize(rows);
    sync();  // factors and sums of decays are complete
    multiply_pairs(rows, to);
    if (warp == 2) weigh_rows(rows, to);
    if constexpr (kDelta) {
      sync();  // A is complete
      if (warp == 0) invert(to);
    }
  }

  // Write the outputs of a chunk.
  __device__ void write(int chunk) const {
    constexpr int kPerRow = kValues / 8;
    const int i = thread / kPerRow, d = thread % kPerRow * 8, row = chunk * kRows + i;
    if (row >= block.request.rows || block.first_value + d >= p.layer.value_dim) return;
    BFloat16* to = static_cast<BFloat16*>(p.out) + (block.request.first + row) * p.out_strides.row +
                   block.h * p.out_strides.head + block.first_value + d;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&shared.out[chunk % 2][i][d]);
  }
};

// A warp's part of the state: values 16 (warp % 2) + group and 8 later, channels first + 8 n + two and the next.
template <int kDim, bool kDelta>
struct State {
  static constexpr int kChannels = kDim / 2, kStateTiles = kChannels / 8, kStateSteps = kChannels / 16;
  float x[kStateTiles][4];
  int warp, half, first, value, group, two;  // value: of the block, the first of the warp

  __device__ explicit State(int warp)
      : warp(warp),
        half(warp / 2),
        first(half * kChannels),
        value(warp % 2 * 16),
        group(lane_id() / 4),
        two(lane_id() % 4 * 2) {
#pragma unroll
    for (auto& tile : x)
#pragma unroll
      for (float& element : tile) element = 0;
  }

  // Call f(two elements, value of the head, channel) for all pairs of elements that the head has.
  template <class F>
  __device__ void each(const RecurrentLayer& layer, int first_value, const F& f) {
#pragma unroll
    for (int n = 0; n < kStateTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int v = first_value + value + group + 8 * e, channel = first + 8 * n + two;
        if (v < layer.value_dim && channel < layer.key_dim) f(x[n][2 * e], x[n][2 * e + 1], v, channel);
      }
  }

  __device__ void scale(float factor) {
#pragma unroll
    for (auto& tile : x)
#pragma unroll
      for (float& element : tile) element *= factor;
  }

  // Fold a pending path, from its records.
  __device__ void fold(const PendingPathsView& p, const RecurrentLayer& layer, const Block& block) {
    const PendingPath& path = block.request.path;
    if (path.count == 0) return;
    const int64_t record = first_record(p, path.buffer, path.slot);
    const float last = layer.g_records[layer.g_start(record + path.nodes[path.count - 1], block.h)];
    scale(expf(last));
    for (int j = 0; j < path.count; ++j) {
      const int64_t node = record + path.nodes[j];
      const float weight = decay(last, layer.g_records[layer.g_start(node, block.h)]);
      const float* u = layer.u_records + layer.u_start(node, block.h);
      const float* k = layer.k_records + layer.k_start(node, block.h);
      each(layer, block.first_value, [&](float& low, float& high, int v, int channel) {
        const float2 two_channels = *reinterpret_cast<const float2*>(k + channel);
        low += weight * u[v] * two_channels.x;
        high += weight * u[v] * two_channels.y;
      });
    }
  }

  // Multiply the warp's channels with keys and queries: [values, rows].
  __device__ void multiply(const Rows<kDim>& rows, float (&of_k)[kTiles][4], float (&of_q)[kTiles][4]) const {
#pragma unroll
    for (int step = 0; step < kStateSteps; ++step) {
      Operand<3> a;
      a.take(x[2 * step], x[2 * step + 1]);
      uint32_t k[kTiles / 2][4], q[kTiles / 2][4];
#pragma unroll
      for (int n = 0; n < kTiles / 2; ++n) {
        if (kDelta) load_matrices(k[n], block_row<kDim + kPadding>(&rows.k[16 * n][first + 16 * step], false));
        load_matrices(q[n], block_row<kDim + kPadding>(&rows.q[16 * n][first + 16 * step], false));
      }
#pragma unroll
      for (int piece = 2; piece >= 0; --piece)
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          if (kDelta) mma<BFloat16>(of_k[n], a.of[piece], k[n / 2][n % 2 * 2], k[n / 2][n % 2 * 2 + 1]);
          if (piece < 2) mma<BFloat16>(of_q[n], a.of[piece], q[n / 2][n % 2 * 2], q[n / 2][n % 2 * 2 + 1]);
        }
    }
  }

  // Add the sums over the other half of the channels: all of keys, and those of queries whose outputs are the warp's,
  // rows 16 half to 16 half + 15.
  __device__ void exchange(Shared<kDim>& shared, float (&of_k)[kTiles][4], const float (&of_q)[kTiles][4],
                           float (&own_q)[kTiles / 2][4]) const {
    const int lane = lane_id();
    auto& sent = shared.partial[warp];
    const auto& received = shared.partial[warp ^ 2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (kDelta) sent[4 * n + e][lane] = of_k[n][e];
        if (n >= kTiles / 2) continue;
        sent[4 * (kTiles + n) + e][lane] = half == 0 ? of_q[n + kTiles / 2][e] : of_q[n][e];
        own_q[n][e] = half == 0 ? of_q[n][e] : of_q[n + kTiles / 2][e];
      }
    if (warp % 2 == 0)
      sync_threads<kExchanging, 2 * kWarp>();
    else
      sync_threads<kExchanging + 1, 2 * kWarp>();
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (kDelta) of_k[n][e] += received[4 * n + e][lane];
        if (n < kTiles / 2) own_q[n][e] += received[4 * (kTiles + n) + e][lane];
      }
  }

  // Compute U [values, rows] from K S0^T, which becomes the right side.
  __device__ void solve(const Rows<kDim>& rows, const Prepared& prepared, float (&of_k)[kTiles][4],
                        float (&u)[kTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      uint32_t v[4];  // pairs of rows, of a value and that 8 later
      // The block's rows are rows of v, its columns values: matrices in the order of operand B, transposed one by one.
      load_transposed_matrices(v, block_row<kValues + kPadding>(&rows.v[8 * n][value], false));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int row = 8 * (n + m) + two;
        const float2 of_v = *reinterpret_cast<const float2*>(&prepared.of_v[row]);
        const float2 factor = *reinterpret_cast<const float2*>(&prepared.of_k[row]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float low = low_of_pair(v[2 * m + e]), high = high_of_pair(v[2 * m + e]);
          if (kDelta) {
            of_k[n + m][2 * e] = of_v.x * low - factor.x * of_k[n + m][2 * e];
            of_k[n + m][2 * e + 1] = of_v.y * high - factor.y * of_k[n + m][2 * e + 1];
          } else {
            u[n + m][2 * e] = of_v.x * low;
            u[n + m][2 * e + 1] = of_v.y * high;
          }
        }
      }
    }
    if constexpr (kDelta) {
      float later[kTiles / 2][4] = {};  // what the second 16 rows give to themselves
#pragma unroll
      for (auto& tile : u)
#pragma unroll
        for (float& element : tile) element = 0;
      Operand<3> a[kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) a[step].take(of_k[2 * step], of_k[2 * step + 1]);
      const auto multiply = [&](float (&to)[4], float (&next)[4], int step, int row, int piece) {
        uint32_t b[4];  // of a piece of the inverse, which meets those of the right side that matter
        load_matrices(b, block_row<kRows + kPadding>(&prepared.inverse[piece][row][16 * step], false));
#pragma unroll
        for (int other = 2 - piece; other >= 0; --other) {
          mma<BFloat16>(to, a[step].of[other], b[0], b[1]);
          mma<BFloat16>(next, a[step].of[other], b[2], b[3]);
        }
      };
#pragma unroll
      for (int piece = 2; piece >= 0; --piece) {
        multiply(u[0], u[1], 0, 0, piece);
        multiply(u[2], u[3], 0, 16, piece);
        multiply(later[0], later[1], 1, 16, piece);
      }
#pragma unroll
      for (int n = 0; n < kTiles / 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) u[kTiles / 2 + n][e] += later[n][e];
    }
  }

  // Write the outputs of rows 16 half to 16 half + 15.
  __device__ void write(const Prepared& prepared, const float (&u)[kTiles][4], const float (&own_q)[kTiles / 2][4],
                        BFloat16 (*out)[kValues + kPadding]) const {
    float sums[kTiles / 2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step > half) break;
      Operand<2> a;
      a.take(u[2 * step], u[2 * step + 1]);
#pragma unroll
      for (int piece = 1; piece >= 0; --piece) {
        uint32_t b[4];
        load_matrices(b, block_row<kRows + kPadding>(&prepared.p[piece][16 * half][16 * step], false));
#pragma unroll
        for (int other = 1 - piece; other >= 0; --other)
#pragma unroll
          for (int n = 0; n < 2; ++n) mma<BFloat16>(sums[n], a.of[other], b[2 * n], b[2 * n + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles / 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 16 * half + 8 * n + two + e % 2;
        out[row][value + group + e / 2 * 8] = from_float<BFloat16>(sums[n][e] + prepared.of_q[row] * own_q[n][e]);
      }
  }

  // Fold the chunk.
  __device__ void fold(const Rows<kDim>& rows, const Prepared& prepared, const float (&u)[kTiles][4]) {
    scale(prepared.decay);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float weighted[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 weight = *reinterpret_cast<const float2*>(&prepared.to_end[16 * step + 8 * n + two]);
#pragma unroll
        for (int e = 0; e < 4; ++e) weighted[n][e] = u[2 * step + n][e] * (e % 2 == 0 ? weight.x : weight.y);
      }
      Operand<3> a;
      a.take(weighted[0], weighted[1]);
      uint32_t k[kStateSteps][4];
#pragma unroll
      for (int n = 0; n < kStateSteps; ++n)
        load_transposed_matrices(k[n], block_row<kDim + kPadding>(&rows.k[16 * step][first + 16 * n], true));
#pragma unroll
      for (int piece = 2; piece >= 0; --piece)
#pragma unroll
        for (int n = 0; n < kStateTiles; ++n)
          mma<BFloat16>(x[n], a.of[piece], k[n / 2][n % 2 * 2], k[n / 2][n % 2 * 2 + 1]);
    }
  }

  // Compute a chunk's outputs, and the state after it.
  __device__ void advance(Shared<kDim>& shared, int chunk) {
    const Rows<kDim>& rows = shared.rows[chunk % kStages];
    const Prepared& prepared = shared.prepared[chunk % 2];
    float of_k[kTiles][4] = {}, of_q[kTiles][4] = {}, own_q[kTiles / 2][4], u[kTiles][4];
    multiply(rows, of_k, of_q);
    exchange(shared, of_k, of_q, own_q);
    solve(rows, prepared, of_k, u);
    write(prepared, u, own_q, shared.out[chunk % 2]);
    fold(rows, prepared, u);
  }
};

template <int kDim, bool kDelta>
__global__ void __launch_bounds__(kThreads, kDim <= 128 ? 2 : 1)
    chain_recurrence_kernel(TreeRecurrenceParams p, unsigned slices) {
  begin_kernel();
  extern __shared__ float4 memory[];
  Shared<kDim>& shared = *reinterpret_cast<Shared<kDim>*>(memory);
  const RecurrentLayer& layer = p.layer;
  const unsigned head = blockIdx.x / slices;
  const int64_t b = head / layer.value_heads, h = head % layer.value_heads;
  const Block block{load_request(p.pending, p.rows, b), h, layer.key_head(h),
                    static_cast<int>(blockIdx.x % slices) * kValues};
  const Request& request = block.request;
  const bool is_bad = is_bad_path(p.pending, request.path, static_cast<int>(threadIdx.x));
  const int32_t bits = request.path.bits | (is_bad ? kBadTree : 0);
  if (request.path.slot < 0 || bits) {
    if (bits && h == 0 && block.first_value == 0 && threadIdx.x == 0)
      set_status(p.pending.status, request.path.slot, bits);
    BFloat16* const out = static_cast<BFloat16*>(p.out) + request.first * p.out_strides.row + h * p.out_strides.head +
                          block.first_value + lane_id();
    if (block.first_value + lane_id() < layer.value_dim)
      for (int64_t i = warp_id(); i < request.rows; i += kThreads / kWarp) out[i * p.out_strides.row] = BFloat16{0};
    return;
  }
  if (request.rows == 0) return;

  const int chunks = (request.rows + kRows - 1) / kRows;
  if (warp_id() < kSideWarps) {
    State<kDim, kDelta> state(warp_id());
    float* const stored = layer.state + layer.state_start(request.path.slot, h);
    if (!request.is_fresh)
      state.each(layer, block.first_value, [&](float& low, float& high, int v, int channel) {
        const float2 pair = *reinterpret_cast<const float2*>(stored + v * layer.key_dim + channel);
        low = pair.x;
        high = pair.y;
      });
    state.fold(p.pending, layer, block);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      __syncthreads();  // the chunk is prepared
      state.advance(shared, chunk);
    }
    __syncthreads();  // the last outputs are in shared memory
    state.each(layer, block.first_value, [&](float& low, float& high, int v, int channel) {
      *reinterpret_cast<float2*>(stored + v * layer.key_dim + channel) = float2{low, high};
    });
  } else {
    const Preparer<kDim, kDelta> preparer{p, block, shared, static_cast<int>(threadIdx.x) - kSideThreads,
                                          warp_id() - kSideWarps};
    preparer.load(0);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      preparer.prepare(chunk);
      if (chunk >= 2) preparer.write(chunk - 2);
      __syncthreads();  // the chunk before is done
    }
    if (chunks >= 2) preparer.write(chunks - 2);
    __syncthreads();  // the last chunk is done
    preparer.write(chunks - 1);
  }
}

template <int kDim>
void launch_chain(const TreeRecurrenceParams& p, Stream stream) {
  const char* op = "tree_recurrence";
  const auto kernel = p.delta_rule ? chain_recurrence_kernel<kDim, true> : chain_recurrence_kernel<kDim, false>;
  const size_t bytes = sizeof(Shared<kDim>);
  SD_CUDA_CHECK(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  const auto slices = static_cast<unsigned>((p.layer.value_dim + kValues - 1) / kValues);
  launch(op, kernel,
         {.grid = grid_x(op, (p.pending.batch + 1) * p.layer.value_heads * slices),
          .threads = kThreads,
          .shared_bytes = bytes},
         stream, p, slices);
}

// Call f.template operator()<kDim>() with the channels that a kernel has for a key.
template <class F>
void with_dim(int64_t key_dim, F&& f) {
#ifndef SPECDEC_COMPILE_CHECK
  if (key_dim <= 64) return f.template operator()<64>();
  if (key_dim > 128) return f.template operator()<256>();
#endif
  f.template operator()<128>();
}

bool is_aligned(const void* rows, const HeadStrides& strides) {
  return (reinterpret_cast<uintptr_t>(rows) | 2 * static_cast<uint64_t>(strides.row | strides.head)) % 16 == 0;
}

}  // namespace

bool chain_runs_on_tensor_cores(const TreeRecurrenceParams& p) {
  if (p.rows.mask != nullptr || p.dtype != kBFloat16 || p.layer.by_channel || !p.aligned_state) return false;
  if (p.layer.key_dim % 8 != 0 || p.layer.value_dim % 8 != 0) return false;
  if (!is_aligned(p.q, p.q_strides) || !is_aligned(p.k, p.k_strides) || !is_aligned(p.v, p.v_strides) ||
      !is_aligned(p.out, p.out_strides))
    return false;
  size_t bytes = 0;
  with_dim(p.layer.key_dim, [&]<int kDim>() { bytes = sizeof(Shared<kDim>); });
  return bytes <= static_cast<size_t>(current_device("tree_recurrence").shared_bytes_per_block);
}

void chain_recurrence(const TreeRecurrenceParams& p, Stream stream) {
  with_dim(p.layer.key_dim, [&]<int kDim>() { launch_chain<kDim>(p, stream); });
}

}  // namespace specdec::recurrent
