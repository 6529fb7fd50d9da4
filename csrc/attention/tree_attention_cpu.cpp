// tree_attention on the CPU. One pass computes up to kRows rows of one request and KV head over tiles of kTokens KV
// rows, gathered into contiguous float32 with K transposed, so that every inner loop runs along a vector.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "attention/common/visibility.h"
#include "core/errors.h"

namespace specdec::attention {
namespace {

constexpr int kTokens = 64;
constexpr int kRows = 64;
constexpr int kRowsPerStep = 4;  // rows that share the registers of an inner loop
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

// State of a pass between tiles, and one tile of KV. Rows are padded with zeros to a multiple of kRowsPerStep.
struct Pass {
  int rows, head_dim;
  float soft_cap;           // 0: none
  float* q;                 // [kRows, head_dim], scaled to log2 units
  float* k_rows;            // [kTokens, head_dim]
  float* k;                 // [head_dim, kTokens]
  float* v;                 // [kTokens, head_dim]
  float* scores;            // [kRows, kTokens], then probabilities
  float* out;               // [kRows, head_dim], not yet divided by sum
  float max[kRows];         // of the scores so far
  float sum[kRows];         // of 2^(score - max)
  float rescale[kRows];     // for this tile: factor of earlier sums under the new max
  uint64_t visible[kRows];  // for this tile: bit j is set if the row attends to token j
};

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
SPECDEC_INLINE void softmax_row(Pass& p, int i) {
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

SPECDEC_CPU_CLONES void attend_tile(Pass& p) {
  const int D = p.head_dim;
  for (int i = 0; i < p.rows; i += kRowsPerStep) {
    const float* q[kRowsPerStep];
    for (int g = 0; g < kRowsPerStep; ++g) q[g] = p.q + (i + g) * D;
    for (int c = 0; c < kTokens; c += kLanes) {
      Lanes s[kRowsPerStep] = {};
      for (int d = 0; d < D; ++d) {
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
      for (int c = 0; c < D; c += kLanes) {
        Lanes o[kRowsPerStep];
        for (int g = 0; g < kRowsPerStep; ++g) o[g] = lanes(p.out + (i + g) * D + c) * p.rescale[i + g];
        for (int j = 0; j < kTokens; ++j) {
          const Lanes v = lanes(p.v + j * D + c);
          for (int g = 0; g < kRowsPerStep; ++g) o[g] += weights[g * kTokens + j] * v;
        }
        for (int g = 0; g < kRowsPerStep; ++g) lanes(p.out + (i + g) * D + c) = o[g];
      }
      continue;
    }
    // Tokens that a row does not attend to must not be read even with weight 0: they may hold NaN.
    for (int r = i; r < i + kRowsPerStep; ++r) {
      float* out = p.out + r * D;
      for (int c = 0; c < D; c += kLanes) lanes(out + c) *= p.rescale[r];
      for (uint64_t left = p.visible[r]; left != 0; left &= left - 1) {
        const int j = std::countr_zero(left);
        const float weight = p.scores[r * kTokens + j];
        for (int c = 0; c < D; c += kLanes) lanes(out + c) += weight * lanes(p.v + j * D + c);
      }
    }
  }
}

// Transpose pass.k_rows to pass.k, in blocks of 4 x 4.
void transpose_keys(Pass& pass) {
  const int D = pass.head_dim;
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

template <class Kv>
void copy_row(const Kv* __restrict from, float* __restrict to, int D) {
  for (int d = 0; d < D; ++d) to[d] = to_float(from[d]);
}

// Fill pass.k and pass.v with KV rows first to first + kTokens - 1, and zeros for those outside [begin, end) or on an
// invalid page; return a mask of the rows that are present.
template <class Kv>
uint64_t gather_tile(Pass& pass, const TreeAttentionParams& p, const Request& r, int64_t head, int64_t first,
                     int64_t begin, int64_t end, int32_t& status) {
  const int D = pass.head_dim;
  const kv::RowDivmod page_size{static_cast<int>(p.rows.page_size)};
  uint64_t present = 0;
  for (int j = 0; j < kTokens; ++j) {
    float *k = pass.k_rows + j * D, *v = pass.v + j * D;
    if (first + j >= begin && first + j < end) {
      const kv::KvRow at = find_row(p.rows, page_size, r.slot, first + j);
      status |= at.bits;
      if (at.bits == 0) {
        copy_row(static_cast<const Kv*>(p.k_pool) + row_start(p.k_strides, at, head), k, D);
        copy_row(static_cast<const Kv*>(p.v_pool) + row_start(p.v_strides, at, head), v, D);
        present |= uint64_t{1} << j;
        continue;
      }
    }
    std::fill_n(k, D, 0.0f);
    std::fill_n(v, D, 0.0f);
  }
  transpose_keys(pass);
  return present;
}

// Compute rows [begin, begin + count) of a request and KV head; row n is query row n / G, head n % G of its GQA group.
template <class T, class Kv>
int32_t attend_rows(Pass& pass, const TreeAttentionParams& p, const Request& r, int64_t head, int64_t begin,
                    int64_t count) {
  const int64_t G = p.q_heads / p.kv_heads, D = p.head_dim;
  const int64_t valid = clamp_to(r.valid_rows * G - begin, int64_t{0}, count);
  int32_t status = 0;
  pass.rows = static_cast<int>((valid + kRowsPerStep - 1) / kRowsPerStep * kRowsPerStep);
  pass.head_dim = static_cast<int>(D);
  pass.soft_cap = p.soft_cap;
  std::fill_n(pass.q, pass.rows * D, 0.0f);
  std::fill_n(pass.out, pass.rows * D, 0.0f);
  std::fill_n(pass.max, pass.rows, kMinusInf);
  std::fill_n(pass.sum, pass.rows, 0.0f);
  for (int64_t n = 0; n < valid; ++n) {
    const int64_t i = (begin + n) / G, h = head * G + (begin + n) % G;
    const T* q = static_cast<const T*>(p.q) + r.q_start + i * p.q_strides.row + h * p.q_strides.head;
    for (int64_t d = 0; d < D; ++d) pass.q[n * D + d] = to_float(q[d]) * p.log2_scale;
  }

  // Tiles start at multiples of kTokens even with a window, so that no row depends on its neighbors.
  const int64_t kv_begin = valid > 0 ? visible_begin(p, r, begin / G) : 0;
  const int64_t kv_end = valid > 0 ? visible_end(p, r, (begin + valid - 1) / G) : 0;
  for (int64_t first = kv_begin / kTokens * kTokens; first < kv_end; first += kTokens) {
    const uint64_t present = gather_tile<Kv>(pass, p, r, head, first, kv_begin, kv_end, status);
    for (int64_t n = 0; n < valid; ++n) pass.visible[n] = present & visible_word(p, r, (begin + n) / G, first);
    // Padding rows take the mask of the row before them, which keeps their neighbors on the fast path.
    for (int64_t n = valid; n < pass.rows; ++n) pass.visible[n] = pass.visible[n - 1];
    attend_tile(pass);
  }

  for (int64_t n = 0; n < count; ++n) {
    const int64_t i = (begin + n) / G, h = head * G + (begin + n) % G;
    T* out = static_cast<T*>(p.out) + r.out_start + i * p.out_strides.row + h * p.out_strides.head;
    const float sum = n < valid ? pass.sum[n] : 0.0f;
    for (int64_t d = 0; d < D; ++d) out[d] = from_float<T>(sum == 0 ? 0.0f : pass.out[n * D + d] / sum * p.v_scale);
    if (p.lse)
      p.lse[(r.flat_row + i) * p.q_heads + h] =
          sum == 0 ? kMinusInf : (pass.max[n] + std::log2(sum)) * 0.6931471805599453f;
  }
  return status;
}

// Refuse lengths that would be clamped: without `status` nothing reports that the result lacks rows.
void check_lengths(const TreeAttentionParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const Request r = load_request(p, b);
    if (r.slot < 0 || (r.status & kBadLength) == 0) continue;
    throw ValueError("tree_attention: request " + std::to_string(b) + " has lengths that do not fit " +
                     std::to_string(p.max_kv_len) + " KV rows (by page_table and max_kv_len), " +
                     std::to_string(p.q_rows) + " rows of q and mask, expected lengths that fit, or status");
  }
}

}  // namespace

void tree_attention_cpu(const TreeAttentionParams& p) {
  if (p.status == nullptr) check_lengths(p);
  // Aligned scratch, kept per thread.
  struct alignas(64) Line {
    float x[16];
  };
  thread_local std::vector<Line> scratch;
  const int64_t D = p.head_dim;
  const int64_t sizes[] = {kRows * D, kTokens * D, D * kTokens, kTokens * D, kRows * kTokens, kRows * D};
  int64_t floats = 0;
  for (int64_t size : sizes) floats += size;
  if (scratch.size() * 16 < static_cast<size_t>(floats)) scratch.resize(floats / 16);
  Pass pass{};
  float* next = scratch[0].x;
  float** parts[] = {&pass.q, &pass.k_rows, &pass.k, &pass.v, &pass.scores, &pass.out};
  for (int n = 0; n < 6; ++n) {
    *parts[n] = next;
    next += sizes[n];
  }

  with_types(p, [&]<class T, class Kv>() {
    const int64_t G = p.q_heads / p.kv_heads, requests = p.batch + (p.cu_seqlens_q != nullptr);
    for (int64_t b = 0; b < requests; ++b) {
      const Request r = load_request(p, b);
      int32_t status = r.status;
      for (int64_t head = 0; head < p.kv_heads; ++head)
        for (int64_t begin = 0; begin < r.rows * G; begin += kRows)
          status |= attend_rows<T, Kv>(pass, p, r, head, begin, std::min<int64_t>(kRows, r.rows * G - begin));
      set_status(p.status, r.slot, status);
    }
  });
}

}  // namespace specdec::attention
