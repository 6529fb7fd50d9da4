// TilePass, compiled for several generations of x86-64.
#include "attention/common/tile_pass.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace specdec::attention {
namespace {

constexpr int kTokens = TilePass::kTokens, kRows = TilePass::kRows, kRowsPerStep = TilePass::kRowsPerStep;
constexpr int kLanes = 16;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// GCC and Clang split these over whatever registers the target has. Aligned like a float: elements of a scratch row.
typedef float Lanes __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t BitLanes __attribute__((vector_size(4 * kLanes)));
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));

// The wheel runs on any x86-64, so the inner loops are compiled for three generations and dispatched at load time.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define SPECDEC_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SPECDEC_CPU_CLONES
#endif
#define SPECDEC_INLINE inline __attribute__((always_inline))

SPECDEC_INLINE Lanes& lanes(float* x) { return *reinterpret_cast<Lanes*>(x); }

// Compute 2^x for x <= 0, to a unit or two in the last place (Cephes' polynomial); x below -126 gives 0, NaN stays NaN.
SPECDEC_INLINE void exp2_lanes(Lanes& x) {
  const float kRound = 12582912.0f;  // adding it leaves the nearest integer in the low mantissa bits
  const Lanes shifted = x + kRound;
  const Lanes f = x - (shifted - kRound);  // in [-1/2, 1/2]
  Lanes y = f * 1.5353362e-4f + 1.3398874e-3f;
  y = y * f + 9.6184374e-3f;
  y = y * f + 5.5503325e-2f;
  y = y * f + 2.4022648e-1f;
  y = y * f + 6.9314720e-1f;
  y = y * f + 1.0f;
  const Lanes scaled = (Lanes)((BitLanes)y + ((BitLanes)shifted << 23));
  x = x >= -126.0f ? scaled : (x < -126.0f ? Lanes{} : x);
}

// Compute tanh, to a few units in the last place (Cephes' polynomial near 0).
SPECDEC_INLINE void tanh_lanes(Lanes& x) {
  const BitLanes sign = (BitLanes)x & 0x80000000u;
  const Lanes size = (Lanes)((BitLanes)x & 0x7fffffffu), z = x * x;
  Lanes near = z * -5.70498873e-3f + 2.06390888e-2f;
  near = near * z - 5.37397155e-2f;
  near = near * z + 1.33314422e-1f;
  near = near * z - 3.33332819e-1f;
  near = near * z * x + x;
  Lanes e = size * -2.88539008f;  // 2 log2(e)
  exp2_lanes(e);
  const Lanes far = (1.0f - e) / (1.0f + e);
  x = size < 0.625f ? near : (Lanes)((BitLanes)far | sign);
}

// Compute the softmax weights of row i over this tile, and rescale the row's earlier sum.
SPECDEC_INLINE void softmax_row(TilePass& p, int i) {
  float* scores = p.scores + i * kTokens;
  if (p.soft_cap != 0) {
    for (int c = 0; c < kTokens; c += kLanes) {
      Lanes x = lanes(scores + c) * (1 / p.soft_cap);
      tanh_lanes(x);
      lanes(scores + c) = x * p.soft_cap;
    }
  }
  if (p.visible[i] != ~uint64_t{0})
    for (int j = 0; j < kTokens; ++j) scores[j] = p.visible[i] >> j & 1 ? scores[j] : kMinusInf;
  Lanes tile_max = lanes(scores);
  for (int c = kLanes; c < kTokens; c += kLanes) tile_max = lanes(scores + c) > tile_max ? lanes(scores + c) : tile_max;
  float max = p.max[i];
  for (int j = 0; j < kLanes; ++j) max = tile_max[j] > max ? tile_max[j] : max;

  const float origin = max > kMinusInf ? max : 0;  // before any visible token: 2^(-inf - 0), not 2^(-inf + inf)
  Lanes total{};
  for (int c = 0; c < kTokens; c += kLanes) {
    Lanes x = lanes(scores + c) - origin;
    exp2_lanes(x);
    lanes(scores + c) = x;
    total += x;
  }
  float sum = 0;
  for (int j = 0; j < kLanes; ++j) sum += total[j];
  p.rescale[i] = std::exp2(p.max[i] - origin);
  p.sum[i] = p.sum[i] * p.rescale[i] + sum;
  p.max[i] = max;
}

SPECDEC_CPU_CLONES void attend_tile(TilePass& p) {
  const int K = p.key_dim, V = p.value_dim;
  for (int i = 0; i < p.rows; i += kRowsPerStep) {
    const float* q[kRowsPerStep];
    for (int g = 0; g < kRowsPerStep; ++g) q[g] = p.q + (i + g) * K;
    for (int c = 0; c < kTokens; c += kLanes) {
      Lanes s[kRowsPerStep] = {};
      for (int d = 0; d < K; ++d) {
        const Lanes k = lanes(p.k + d * kTokens + c);
        for (int g = 0; g < kRowsPerStep; ++g) s[g] += q[g][d] * k;
      }
      for (int g = 0; g < kRowsPerStep; ++g) lanes(p.scores + (i + g) * kTokens + c) = s[g];
    }

    uint64_t visible_to_all = ~uint64_t{0};
    for (int g = 0; g < kRowsPerStep; ++g) {
      softmax_row(p, i + g);
      visible_to_all &= p.visible[i + g];
    }

    if (visible_to_all == ~uint64_t{0}) {
      const float* weights = p.scores + i * kTokens;
      for (int c = 0; c < V; c += kLanes) {
        Lanes o[kRowsPerStep];
        for (int g = 0; g < kRowsPerStep; ++g) o[g] = lanes(p.out + (i + g) * V + c) * p.rescale[i + g];
        for (int j = 0; j < kTokens; ++j) {
          const Lanes v = lanes(p.v + j * p.value_stride + c);
          for (int g = 0; g < kRowsPerStep; ++g) o[g] += weights[g * kTokens + j] * v;
        }
        for (int g = 0; g < kRowsPerStep; ++g) lanes(p.out + (i + g) * V + c) = o[g];
      }
      continue;
    }
    // Tokens that a row does not attend to must not be read even with weight 0: they may hold NaN.
    for (int r = i; r < i + kRowsPerStep; ++r) {
      float* out = p.out + r * V;
      for (int c = 0; c < V; c += kLanes) lanes(out + c) *= p.rescale[r];
      for (uint64_t left = p.visible[r]; left != 0; left &= left - 1) {
        const int j = std::countr_zero(left);
        const float weight = p.scores[r * kTokens + j];
        for (int c = 0; c < V; c += kLanes) lanes(out + c) += weight * lanes(p.v + j * p.value_stride + c);
      }
    }
  }
}

// Transpose pass.k_rows to pass.k, in blocks of 4 x 4.
void transpose_keys(TilePass& pass) {
  const int D = pass.key_dim;
  for (int d = 0; d < D; d += 4) {
    for (int j = 0; j < kTokens; j += 4) {
      Quad in[4], even[2], odd[2];
      for (int n = 0; n < 4; ++n) in[n] = *reinterpret_cast<const Quad*>(pass.k_rows + (j + n) * D + d);
      for (int n = 0; n < 2; ++n) {
        even[n] = __builtin_shufflevector(in[n], in[n + 2], 0, 4, 1, 5);
        odd[n] = __builtin_shufflevector(in[n], in[n + 2], 2, 6, 3, 7);
      }
      float* k = pass.k + d * kTokens + j;
      *reinterpret_cast<Quad*>(k) = __builtin_shufflevector(even[0], even[1], 0, 4, 1, 5);
      *reinterpret_cast<Quad*>(k + kTokens) = __builtin_shufflevector(even[0], even[1], 2, 6, 3, 7);
      *reinterpret_cast<Quad*>(k + 2 * kTokens) = __builtin_shufflevector(odd[0], odd[1], 0, 4, 1, 5);
      *reinterpret_cast<Quad*>(k + 3 * kTokens) = __builtin_shufflevector(odd[0], odd[1], 2, 6, 3, 7);
    }
  }
}

}  // namespace

TilePass TilePass::allocate(int64_t key_dim, int64_t value_dim, bool values_in_keys) {
  struct alignas(64) Line {
    float x[16];
  };
  thread_local std::vector<Line> scratch;
  const int64_t sizes[] = {kRows * key_dim,   kTokens * key_dim,
                           key_dim * kTokens, values_in_keys ? 0 : kTokens * value_dim,
                           kRows * kTokens,   kRows * value_dim};
  int64_t floats = 0;
  for (int64_t size : sizes) floats += size;
  if (scratch.size() * 16 < static_cast<size_t>(floats)) scratch.resize(floats / 16);
  TilePass pass{};
  float* next = scratch[0].x;
  float** parts[] = {&pass.q, &pass.k_rows, &pass.k, &pass.v, &pass.scores, &pass.out};
  for (int n = 0; n < 6; ++n) {
    *parts[n] = next;
    next += sizes[n];
  }
  if (values_in_keys) pass.v = pass.k_rows;
  pass.key_dim = static_cast<int>(key_dim);
  pass.value_dim = static_cast<int>(value_dim);
  pass.value_stride = values_in_keys ? pass.key_dim : pass.value_dim;
  return pass;
}

void TilePass::begin(int64_t count) {
  rows = static_cast<int>((count + kRowsPerStep - 1) / kRowsPerStep * kRowsPerStep);
  std::fill_n(q, rows * key_dim, 0.0f);
  std::fill_n(out, rows * value_dim, 0.0f);
  std::fill_n(max, rows, kMinusInf);
  std::fill_n(sum, rows, 0.0f);
}

void TilePass::add_tile() {
  transpose_keys(*this);
  attend_tile(*this);
}

float TilePass::lse(int64_t row) const {
  return sum[row] == 0 ? kMinusInf : (max[row] + std::log2(sum[row])) * 0.6931471805599453f;
}

}  // namespace specdec::attention
