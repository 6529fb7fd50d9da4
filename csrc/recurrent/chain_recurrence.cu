// Run a recurrence over chains of bfloat16 rows on tensor cores: prefill.
//
// One block per request, value head and slice of 32 values; chunks of 16 rows one after the other, with the state in
// registers as accumulators of mma.sync. A warp has a quarter of the channels. Products of keys and queries with each
// other are exact: rows stay as they are, and factors (normalization, scale, beta, decays) are applied to the sums. The
// state, and u when it is folded, are split into three bfloat16 numbers each, which together hold all bits of a
// float32. Rows of the next chunk are loaded while this one is computed.
//
// A chunk's critical path is what counts, as chunks depend on each other: some 80 mma per warp and five barriers.
#include "core/mma.cuh"
#include "core/warp.cuh"
#include "recurrent/block_tree.cuh"
#include "recurrent/chain_recurrence.h"

namespace specdec::recurrent {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr int kValues = 32;                    // of a block
constexpr int kRows = kChunkRows;              // of a chunk
constexpr int kRowThreads = kThreads / kRows;  // threads that load a row
constexpr int kValueStride = kValues + 4;      // so that threads of a fragment write to different banks
constexpr int kWarpRows = kRows / kWarps;      // whose outputs a warp writes
static_assert(kRows == 16 && kValues == kWarp);

// Return bfloat16 numbers whose sum is x, to all bits of a float32, in pairs of two elements.
struct Pieces {
  uint32_t of[3];
};
__device__ __forceinline__ Pieces split(float x, float y) {
  Pieces pieces;
#pragma unroll
  for (uint32_t& piece : pieces.of) {
    const BFloat16 high_x = from_float<BFloat16>(x), high_y = from_float<BFloat16>(y);
    piece = high_x.bits | static_cast<uint32_t>(high_y.bits) << 16;
    x -= to_float(high_x);
    y -= to_float(high_y);
  }
  return pieces;
}

__device__ __forceinline__ float decay(float later, float earlier) { return expf(fminf(later - earlier, 0.0f)); }

template <int kDim>
struct SharedChunk {
  static constexpr int kStride = kDim + 8;  // of keys: 8 rows of a fragment are in different banks

  BFloat16 k[kRows][kStride], q[kRows][kStride];  // as they came; 0 beyond key_dim and after the last row
  float partial[kWarps][2][kRows][kValueStride];  // of each warp's channels: S0 k, S0 q
  float u[kRows][kValueStride];                   // v, then u
  float pairs[kRows][kRows];  // beta_i e^{G_i - G_j} k_i . k_j at [j][i], e^{G_i - G_j} q_i . k_j at [i][j]
  float diagonal[kRows];      // q_i . k_i
  float k_factor[kRows], q_factor[kRows], g[kRows], beta[kRows];
};

// A thread's part of the rows of a chunk: elements 4 (part + 8 c) and the next 3 of one row.
template <int kDim>
struct LoadedRows {
  static constexpr int kParts = kDim / (4 * kRowThreads);
  uint2 k[kParts], q[kParts];
  float v[4], g, beta;

  __device__ void load(const TreeRecurrenceParams& p, const Request& request, int64_t h, int first_value, int first) {
    const int i = static_cast<int>(threadIdx.x) / kRowThreads, part = static_cast<int>(threadIdx.x) % kRowThreads;
    const int width = static_cast<int>(p.layer.key_dim);
    const bool is_row = first + i < request.rows;
    const int64_t row = request.first + first + (is_row ? i : 0), key_head = p.layer.key_head(h);
    const BFloat16* from_q = static_cast<const BFloat16*>(p.q) + row * p.q_strides.row + key_head * p.q_strides.head;
    const BFloat16* from_k = static_cast<const BFloat16*>(p.k) + row * p.k_strides.row + key_head * p.k_strides.head;
    const BFloat16* from_v =
        static_cast<const BFloat16*>(p.v) + row * p.v_strides.row + h * p.v_strides.head + first_value;
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      const int d = 4 * (part + kRowThreads * c);
      k[c] = q[c] = uint2{0, 0};
      if (!is_row || d >= width) continue;
      k[c] = *reinterpret_cast<const uint2*>(from_k + d);
      q[c] = *reinterpret_cast<const uint2*>(from_q + d);
    }
    const int num_values = static_cast<int>(p.layer.value_dim) - first_value;
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = is_row && 4 * part + e < num_values ? to_float(from_v[4 * part + e]) : 0;
    g = is_row ? p.g[row * p.g_strides.row + h * p.g_strides.head] : 0;
    beta = is_row && p.beta != nullptr ? p.beta[row * p.beta_stride + h] : 1;
  }

  __device__ static float square_sum(const uint2 (&x)[kParts]) {
    float sum = 0;
#pragma unroll
    for (const uint2& four : x) {
#pragma unroll
      for (const uint32_t pair : {four.x, four.y}) {
        const float low = to_float(BFloat16{static_cast<uint16_t>(pair)});
        const float high = to_float(BFloat16{static_cast<uint16_t>(pair >> 16)});
        sum += low * low + high * high;
      }
    }
#pragma unroll
    for (int step = kRowThreads / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    return sum;
  }

  // Store the rows and their factors.
  __device__ void store(const TreeRecurrenceParams& p, SharedChunk<kDim>& chunk) const {
    const int i = static_cast<int>(threadIdx.x) / kRowThreads, part = static_cast<int>(threadIdx.x) % kRowThreads;
    float k_factor = 1, q_factor = p.scale;
    if (p.normalizes) {
      k_factor /= sqrtf(square_sum(k) + p.l2norm_eps);
      q_factor /= sqrtf(square_sum(q) + p.l2norm_eps);
    }
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      const int d = 4 * (part + kRowThreads * c);
      *reinterpret_cast<uint2*>(&chunk.k[i][d]) = k[c];
      *reinterpret_cast<uint2*>(&chunk.q[i][d]) = q[c];
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) chunk.u[i][4 * part + e] = v[e];
    if (part != 0) return;
    chunk.k_factor[i] = k_factor;
    chunk.q_factor[i] = q_factor;
    chunk.beta[i] = beta;
    chunk.g[i] = g;
  }
};

// Load two neighboring bfloat16 numbers.
__device__ __forceinline__ uint32_t pair_at(const BFloat16* x) { return *reinterpret_cast<const uint32_t*>(x); }

// Multiply keys and queries with keys: each warp has one of the two and 8 of the columns.
template <int kDim>
__device__ void multiply_pairs(SharedChunk<kDim>& chunk) {
  const int group = lane_id() / 4, two = lane_id() % 4 * 2;
  const bool of_queries = warp_id() >= 2;
  const int column = warp_id() % 2 * 8;
  const auto& rows = of_queries ? chunk.q : chunk.k;
  float sums[4] = {};
#pragma unroll
  for (int d = 0; d < kDim; d += 16) {
    const uint32_t a[4] = {pair_at(&rows[group][d + two]), pair_at(&rows[group + 8][d + two]),
                           pair_at(&rows[group][d + 8 + two]), pair_at(&rows[group + 8][d + 8 + two])};
    mma<BFloat16>(sums, a, pair_at(&chunk.k[column + group][d + two]), pair_at(&chunk.k[column + group][d + 8 + two]));
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int i = group + n / 2 * 8, j = column + two + n % 2;
    const float product = sums[n] * chunk.k_factor[j] * decay(chunk.g[i], chunk.g[j]);
    if (of_queries) {
      if (j < i) chunk.pairs[i][j] = chunk.q_factor[i] * product;
      if (j == i) chunk.diagonal[i] = chunk.q_factor[i] * product;
    } else if (j < i) {
      chunk.pairs[j][i] = chunk.beta[i] * chunk.k_factor[i] * product;
    }
  }
}

// A warp's part of the state: values 16 m + group (and 8 more), channels first + 8 n + two (and 1 more).
template <int kDim>
struct StateFragments {
  static constexpr int kChannels = kDim / kWarps, kTiles = kChannels / 8;
  float x[2][kTiles][4];
  int first, group, two;

  __device__ StateFragments() : first(warp_id() * kChannels), group(lane_id() / 4), two(lane_id() % 4 * 2) {}

  // Call f(element, value, channel) for every element that the head has.
  template <class F>
  __device__ void each(const RecurrentLayer& layer, int first_value, const F& f) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int value = first_value + 16 * m + group + e / 2 * 8, channel = first + 8 * n + two + e % 2;
          if (value < layer.value_dim && channel < layer.key_dim) f(x[m][n][e], value, channel);
        }
  }

  __device__ void clear() {
#pragma unroll
    for (auto& tiles : x)
#pragma unroll
      for (auto& tile : tiles)
#pragma unroll
        for (float& element : tile) element = 0;
  }

  __device__ void scale(float factor) {
#pragma unroll
    for (auto& tiles : x)
#pragma unroll
      for (auto& tile : tiles)
#pragma unroll
        for (float& element : tile) element *= factor;
  }

  // Fold a pending path, from its records.
  __device__ void fold(const PendingPathsView& p, const RecurrentLayer& layer, const PendingPath& path, int64_t h,
                       int first_value) {
    if (path.count == 0) return;
    const int64_t record = first_record(p, path.buffer, path.slot);
    const float last = layer.g_records[layer.g_start(record + path.nodes[path.count - 1], h)];
    scale(expf(last));
    for (int j = 0; j < path.count; ++j) {
      const int64_t node = record + path.nodes[j];
      const float weight = decay(last, layer.g_records[layer.g_start(node, h)]);
      const float *u = layer.u_records + layer.u_start(node, h), *k = layer.k_records + layer.k_start(node, h);
      each(layer, first_value,
           [&](float& element, int value, int channel) { element += weight * u[value] * k[channel]; });
    }
  }

  // Write the products of this warp's channels with all keys and queries.
  __device__ void multiply(SharedChunk<kDim>& chunk) const {
    float sums[2][2][2][4] = {};  // keys or queries, 8 rows, 16 values
#pragma unroll
    for (int step = 0; step < kTiles; step += 2) {
      const int d = first + 8 * step + two;
      Pieces pieces[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float (&tile)[4] = x[m][step + e / 2];
          pieces[m][e] = split(tile[e % 2 * 2], tile[e % 2 * 2 + 1]);
        }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const BFloat16 *k = &chunk.k[8 * n + group][d], *q = &chunk.q[8 * n + group][d];
        const uint32_t k0 = pair_at(k), k1 = pair_at(k + 8), q0 = pair_at(q), q1 = pair_at(q + 8);
#pragma unroll
        for (int piece = 2; piece >= 0; --piece)
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const uint32_t a[4] = {pieces[m][0].of[piece], pieces[m][1].of[piece], pieces[m][2].of[piece],
                                   pieces[m][3].of[piece]};
            mma<BFloat16>(sums[0][n][m], a, k0, k1);
            mma<BFloat16>(sums[1][n][m], a, q0, q1);
          }
      }
    }
    const int warp = warp_id();
#pragma unroll
    for (int of = 0; of < 2; ++of)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            chunk.partial[warp][of][8 * n + two + e % 2][16 * m + group + e / 2 * 8] = sums[of][n][m][e];
  }

  // Fold the chunk.
  __device__ void fold(const SharedChunk<kDim>& chunk, float last) {
    scale(expf(last));
    Pieces u[2][4];  // 16 values, rows two and two + 8
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int j = two + e / 2 * 8;
      const float weights[2] = {decay(last, chunk.g[j]) * chunk.k_factor[j],
                                decay(last, chunk.g[j + 1]) * chunk.k_factor[j + 1]};
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int value = 16 * m + group + e % 2 * 8;
        u[m][e] = split(chunk.u[j][value] * weights[0], chunk.u[j + 1][value] * weights[1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int d = first + 8 * n + group;
      uint32_t k[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        k[e] = chunk.k[two + 8 * e][d].bits | static_cast<uint32_t>(chunk.k[two + 8 * e + 1][d].bits) << 16;
#pragma unroll
      for (int piece = 2; piece >= 0; --piece)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const uint32_t a[4] = {u[m][0].of[piece], u[m][1].of[piece], u[m][2].of[piece], u[m][3].of[piece]};
          mma<BFloat16>(x[m][n], a, k[0], k[1]);
        }
    }
  }
};

template <int kDim>
__global__ void __launch_bounds__(kThreads) chain_recurrence_kernel(TreeRecurrenceParams p, unsigned slices) {
  begin_kernel();
  extern __shared__ float4 shared[];
  SharedChunk<kDim>& chunk = *reinterpret_cast<SharedChunk<kDim>*>(shared);
  const RecurrentLayer& layer = p.layer;
  const unsigned head = blockIdx.x / slices;
  const int64_t b = head / layer.value_heads, h = head % layer.value_heads;
  const int first_value = static_cast<int>(blockIdx.x % slices) * kValues, lane = lane_id();
  const bool has_value = first_value + lane < layer.value_dim;
  const Request request = load_request(p.pending, p.rows, b);
  const PendingPath& path = request.path;
  const bool is_bad = is_bad_tree(p.pending, nullptr, path, nullptr, static_cast<int>(threadIdx.x));
  const int32_t bits = path.bits | (is_bad ? kBadTree : 0);
  BFloat16* const out =
      static_cast<BFloat16*>(p.out) + request.first * p.out_strides.row + h * p.out_strides.head + first_value + lane;
  if (path.slot < 0 || bits) {
    if (bits && h == 0 && first_value == 0 && threadIdx.x == 0) set_status(p.pending.status, path.slot, bits);
    if (has_value)
      for (int64_t i = warp_id(); i < request.rows; i += kWarps) out[i * p.out_strides.row] = BFloat16{0};
    return;
  }
  if (request.rows == 0) return;

  LoadedRows<kDim> loaded;
  loaded.load(p, request, h, first_value, 0);
  StateFragments<kDim> state;
  state.clear();
  float* const stored = layer.state + layer.state_start(path.slot, h);
  if (!request.is_fresh)
    state.each(layer, first_value,
               [&](float& x, int value, int channel) { x = stored[value * layer.key_dim + channel]; });
  state.fold(p.pending, layer, path, h, first_value);

  for (int first = 0; first < request.rows; first += kRows) {
    loaded.store(p, chunk);
    __syncthreads();  // the rows are stored
    loaded.load(p, request, h, first_value, first + kRows);
    if (threadIdx.x < kWarp) {
      const float sum = sum_up_to_lane(lane < kRows ? chunk.g[lane] : 0.0f);
      if (lane < kRows) chunk.g[lane] = sum;
    }
    state.multiply(chunk);
    __syncthreads();  // sums of decays and the products of all channels are complete
    multiply_pairs(chunk);
    float outs[kWarpRows];
#pragma unroll
    for (int n = 0; n < kWarpRows; ++n) {
      const int i = kWarpRows * warp_id() + n;
      float k_sum = 0, q_sum = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        k_sum += chunk.partial[warp][0][i][lane];
        q_sum += chunk.partial[warp][1][i][lane];
      }
      const float factor = expf(chunk.g[i]);
      outs[n] = factor * chunk.q_factor[i] * q_sum;
      if (p.beta != nullptr) chunk.u[i][lane] = chunk.beta[i] * (chunk.u[i][lane] - factor * chunk.k_factor[i] * k_sum);
    }
    __syncthreads();  // pairs and the right sides are complete
    if (p.beta != nullptr) {
      if (warp_id() == 0) {
        float u[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) u[i] = chunk.u[i][lane];
#pragma unroll
        for (int j = 0; j < kRows; ++j)
#pragma unroll
          for (int i = j + 1; i < kRows; ++i) u[i] -= chunk.pairs[j][i] * u[j];
#pragma unroll
        for (int i = 0; i < kRows; ++i) chunk.u[i][lane] = u[i];
      }
      __syncthreads();  // u is complete
    }
#pragma unroll
    for (int n = 0; n < kWarpRows; ++n) {
      const int i = kWarpRows * warp_id() + n;
      float sum = outs[n] + chunk.diagonal[i] * chunk.u[i][lane];
      for (int j = 0; j < i; ++j) sum += chunk.pairs[i][j] * chunk.u[j][lane];
      if (has_value && first + i < request.rows) out[(first + i) * p.out_strides.row] = from_float<BFloat16>(sum);
    }
    state.fold(chunk, chunk.g[kRows - 1]);
    __syncthreads();  // before the next rows overwrite these
  }
  state.each(layer, first_value,
             [&](float& x, int value, int channel) { stored[value * layer.key_dim + channel] = x; });
}

template <int kDim>
void launch_chain(const TreeRecurrenceParams& p, Stream stream) {
  const char* op = "tree_recurrence";
  const auto kernel = chain_recurrence_kernel<kDim>;
  const size_t bytes = sizeof(SharedChunk<kDim>);
  if (bytes > 48 * 1024)
    SD_CUDA_CHECK(op,
                  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  const auto slices = static_cast<unsigned>((p.layer.value_dim + kValues - 1) / kValues);
  launch(op, kernel,
         {.grid = grid_x(op, (p.pending.batch + 1) * p.layer.value_heads * slices),
          .threads = kThreads,
          .shared_bytes = bytes},
         stream, p, slices);
}

}  // namespace

bool chain_runs_on_tensor_cores(const TreeRecurrenceParams& p) {
  return p.rows.mask == nullptr && p.dtype == kBFloat16 && !p.layer.by_channel && p.aligned_rows;
}

void chain_recurrence(const TreeRecurrenceParams& p, Stream stream) {
  if (p.layer.key_dim <= 64) return launch_chain<64>(p, stream);
  if (p.layer.key_dim <= 128) return launch_chain<128>(p, stream);
  launch_chain<256>(p, stream);
}

}  // namespace specdec::recurrent
