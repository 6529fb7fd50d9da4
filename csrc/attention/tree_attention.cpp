#include "attention/tree_attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention/visibility.h"
#include "core/floats.h"

namespace specdec {
namespace {

// The stride of a dimension that is walked; that of a dimension of size 1 may be any number.
int64_t walked_stride(const TensorView& t, int i) { return t.shape(i) > 1 ? t.stride(i) : 0; }

RowStrides row_strides(const TensorView& t) {
  const int n = static_cast<int>(t.ndim());
  return {n == 4 ? walked_stride(t, 0) : 0, walked_stride(t, n - 3), walked_stride(t, n - 2)};
}

PoolStrides pool_strides(const TensorView& t) {
  return {walked_stride(t, 0), walked_stride(t, 1), walked_stride(t, 2)};
}

bool rows_on_16_bytes(const TensorView& t) {
  auto bytes = reinterpret_cast<uintptr_t>(t.data<void>());
  for (int i = 0; i < t.ndim(); ++i) bytes |= walked_stride(t, i) * (t.dl.dtype.bits / 8) * (i + 1 < t.ndim());
  return bytes % 16 == 0;
}

constexpr double kLog2e = 1.4426950408889634;

}  // namespace

void tree_attention(CallStream stream, const TensorView& q, const TensorView& k_pool, const TensorView& v_pool,
                    const TensorView& page_table, const TensorView& prefix_lens, const OptTensor& slots,
                    const OptTensor& q_lens, const OptTensor& cu_seqlens_q, std::optional<int64_t> tail_len,
                    const OptTensor& mask, std::optional<double> scale, std::optional<int64_t> window,
                    std::optional<double> soft_cap, double k_scale, double v_scale, std::optional<int64_t> fixed_split,
                    const TensorView& out, const OptTensor& lse, const OptTensor& workspace, const OptTensor& status) {
  Check check("tree_attention");
  Dim B{"batch"}, Q{"q_rows"}, Hq{"q_heads"}, Hkv{"kv_heads"}, D{"head_dim"}, W{"mask_words"};
  Dim P{"num_pages"}, page_size{"page_size"}, num_slots{"num_slots"}, max_pages{"max_pages"}, ends{"batch + 1"};
  const bool packed = cu_seqlens_q.has_value();
  if (packed)
    check.strided("q", q, {Q, Hq, D}, kFloats);
  else
    check.strided("q", q, {B, Q, Hq, D}, kFloats);
  const Dtypes dtype = dtype_of(q);
  check.that(D == 64 || D == 128 || D == 256, "q", "has head_dim " + std::to_string(D), "64, 128 or 256");
  check.strided("k_pool", k_pool, {P, page_size, Hkv, D}, dtype);
  check.that(page_size >= 1 && page_size <= INT32_MAX, "k_pool", "has page_size " + std::to_string(page_size),
             "1 or more");
  check.that(Hkv >= 1 && Hq % Hkv == 0, "k_pool",
             "has " + std::to_string(Hkv) + " heads for the " + std::to_string(Hq) + " of q",
             "a number of heads that divides it");
  check.range("kv_heads", Hkv, 1, kMaxGridY);
  check.strided("v_pool", v_pool, {P, page_size, Hkv, D}, dtype);
  check.tensor("page_table", page_table, {num_slots, max_pages}, kInt32);
  check.tensor("prefix_lens", prefix_lens, {num_slots}, kInt32);
  if (packed) {
    check.that(!q_lens, "q_lens", "is given beside cu_seqlens_q", "one of the two");
    check.tensor("cu_seqlens_q", *cu_seqlens_q, {ends}, kInt32);
    check.that(ends >= 1, "cu_seqlens_q", "is empty", "batch + 1 row numbers");
    B.value = ends - 1;
  }
  check.slots(slots, B, num_slots);
  check.tensor("q_lens", q_lens, {B}, kInt32);
  if (tail_len) check.range("tail_len", *tail_len, 0, INT32_MAX);
  if (packed)
    check.tensor("mask", mask, {Q, W}, kInt64);
  else
    check.tensor("mask", mask, {B, Q, W}, kInt64);
  const int64_t known_tail = tail_len ? *tail_len : packed ? 0 : Q.value;
  check.that(!mask || 64 * W >= known_tail, "mask", "has mask_words " + std::to_string(W),
             std::to_string((known_tail + 63) / 64) + " or more for a tail of " + std::to_string(known_tail));
  if (packed) {
    check.strided_output("out", out, {Q, Hq, D}, dtype);
    check.output("lse", lse, {Q, Hq}, kFloat32);
  } else {
    check.strided_output("out", out, {B, Q, Hq, D}, dtype);
    check.output("lse", lse, {B, Q, Hq}, kFloat32);
  }
  Dim floats{"floats"};
  check.output("workspace", workspace, {floats}, kFloat32);
  check.output("status", status, {num_slots}, kInt32);
  if (Q == 0 || Hq == 0 || (B == 0 && !packed)) return;

  const TreeAttentionParams params{
      .q = q.data<void>(),
      .k_pool = k_pool.data<void>(),
      .v_pool = v_pool.data<void>(),
      .out = out.data<void>(),
      .dtype = dtype,
      .fp8 = false,
      .q_strides = row_strides(q),
      .out_strides = row_strides(out),
      .k_strides = pool_strides(k_pool),
      .v_strides = pool_strides(v_pool),
      .rows = {.page_table = page_table.data<const int32_t>(),
               .page_refs = nullptr,
               .max_pages = max_pages,
               .num_pages = P,
               .page_size = page_size},
      .prefix_lens = prefix_lens.data<const int32_t>(),
      .slots = data_or_null<const int32_t>(slots),
      .q_lens = data_or_null<const int32_t>(q_lens),
      .cu_seqlens_q = data_or_null<const int32_t>(cu_seqlens_q),
      .mask = data_or_null<const int64_t>(mask),
      .lse = data_or_null<float>(lse),
      .status = data_or_null<int32_t>(status),
      .batch = B,
      .q_rows = Q,
      .q_heads = Hq,
      .kv_heads = Hkv,
      .head_dim = D,
      .num_slots = num_slots,
      .mask_words = mask ? W.value : 0,
      .tail_len = tail_len.value_or(-1),
      .window = window.value_or(INT64_MAX),
      .log2_scale = static_cast<float>(scale.value_or(1 / std::sqrt(static_cast<double>(D))) * k_scale * kLog2e),
      .soft_cap = static_cast<float>(soft_cap.value_or(0) * kLog2e),
      .v_scale = static_cast<float>(v_scale),
      .aligned = rows_on_16_bytes(k_pool) && rows_on_16_bytes(v_pool) && rows_on_16_bytes(q) && rows_on_16_bytes(out),
      .fixed_split = fixed_split.value_or(0),
      .workspace = data_or_null<float>(workspace),
      .workspace_floats = workspace ? floats.value : 0,
  };
  SD_DISPATCH(check, stream, tree_attention, params);
}

int64_t tree_attention_workspace(const TensorView& q, const TensorView& k_pool, const TensorView& page_table,
                                 const OptTensor& cu_seqlens_q, std::optional<int64_t> fixed_split) {
  if (!q.is_cuda()) return 0;
#ifdef SPECDEC_WITH_CUDA
  const bool packed = cu_seqlens_q.has_value();
  TreeAttentionParams p{};
  p.dtype = dtype_of(q);
  p.aligned = true;
  p.rows = {.page_table = nullptr,
            .page_refs = nullptr,
            .max_pages = page_table.shape(1),
            .num_pages = k_pool.shape(0),
            .page_size = k_pool.shape(1)};
  p.cu_seqlens_q = packed ? cu_seqlens_q->data<const int32_t>() : nullptr;
  p.batch = packed ? cu_seqlens_q->shape(0) - 1 : q.shape(0);
  p.q_rows = q.shape(packed ? 0 : 1);
  p.q_heads = q.shape(packed ? 1 : 2);
  p.head_dim = q.shape(packed ? 2 : 3);
  p.kv_heads = k_pool.shape(2);
  p.fixed_split = fixed_split.value_or(0);
  DeviceGuard guard(q.dl.device.device_id);
  return tree_attention_workspace_cuda(p);
#else
  return 0;
#endif
}

// The CPU twin. One pass handles up to kRows rows of one request and KV head over tiles of kTokens KV rows, gathered
// into contiguous float32 with K transposed, so that every inner loop runs along a vector.
namespace {

constexpr int kTokens = 64;
constexpr int kRows = 64;
constexpr int kGroup = 4;  // rows that share the registers of an inner loop
constexpr int kLanes = 16;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// GCC and Clang split these over whatever registers the target has. Aligned like a float: numbers of a scratch row.
typedef float Lanes __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t BitLanes __attribute__((vector_size(4 * kLanes)));

// The wheel runs on any x86-64, so the inner loops are compiled for three generations and picked at load time.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define SPECDEC_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SPECDEC_CPU_CLONES
#endif
#define SPECDEC_INLINE inline __attribute__((always_inline))

// What one pass keeps between tiles, and one tile of KV. Rows are padded to a multiple of kGroup with zeros.
struct Pass {
  int rows, head_dim;
  float* q;              // [kRows, head_dim], scaled for powers of two
  float* k;              // [head_dim, kTokens]
  float* v;              // [kTokens, head_dim]
  float* scores;         // [kRows, kTokens], then probabilities
  float* out;            // [kRows, head_dim], not yet divided by sum
  float max[kRows];      // of the scores so far
  float sum[kRows];      // of 2^(score - max)
  float rescale[kRows];  // of this tile: what a higher max makes of earlier sums
  uint64_t seen[kRows];  // of this tile: bit j: the row sees token j
};

SPECDEC_INLINE Lanes& lanes(float* x) { return *reinterpret_cast<Lanes*>(x); }

// 2^x for x <= 0, to a unit or two in the last place (Cephes' polynomial); x below -126 gives 0, NaN stays NaN.
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

// Softmax weights of row i over this tile, and what they make of the sums before it.
SPECDEC_INLINE void weigh_row(Pass& p, int i) {
  float* scores = p.scores + i * kTokens;
  for (int j = 0; j < kTokens; ++j) scores[j] = p.seen[i] >> j & 1 ? scores[j] : kNone;
  Lanes top = lanes(scores);
  for (int c = kLanes; c < kTokens; c += kLanes) top = lanes(scores + c) > top ? lanes(scores + c) : top;
  float max = p.max[i];
  for (int j = 0; j < kLanes; ++j) max = top[j] > max ? top[j] : max;

  const float origin = max > kNone ? max : 0;  // nothing seen yet: 2^(-inf - 0), not 2^(-inf + inf)
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
  for (int i = 0; i < p.rows; i += kGroup) {
    const float* q[kGroup];
    for (int g = 0; g < kGroup; ++g) q[g] = p.q + (i + g) * D;
    for (int c = 0; c < kTokens; c += kLanes) {
      Lanes s[kGroup] = {};
      for (int d = 0; d < D; ++d) {
        const Lanes k = lanes(p.k + d * kTokens + c);
        for (int g = 0; g < kGroup; ++g) s[g] += q[g][d] * k;
      }
      for (int g = 0; g < kGroup; ++g) lanes(p.scores + (i + g) * kTokens + c) = s[g];
    }

    uint64_t seen_by_all = ~uint64_t{0};
    for (int g = 0; g < kGroup; ++g) {
      weigh_row(p, i + g);
      seen_by_all &= p.seen[i + g];
    }

    if (seen_by_all == ~uint64_t{0}) {
      const float* weights = p.scores + i * kTokens;
      for (int c = 0; c < D; c += kLanes) {
        Lanes o[kGroup];
        for (int g = 0; g < kGroup; ++g) o[g] = lanes(p.out + (i + g) * D + c) * p.rescale[i + g];
        for (int j = 0; j < kTokens; ++j) {
          const Lanes v = lanes(p.v + j * D + c);
          for (int g = 0; g < kGroup; ++g) o[g] += weights[g * kTokens + j] * v;
        }
        for (int g = 0; g < kGroup; ++g) lanes(p.out + (i + g) * D + c) = o[g];
      }
      continue;
    }
    // A row must not meet tokens it does not see even with weight 0: they may hold NaN.
    for (int r = i; r < i + kGroup; ++r) {
      float* out = p.out + r * D;
      for (int c = 0; c < D; c += kLanes) lanes(out + c) *= p.rescale[r];
      for (uint64_t left = p.seen[r]; left != 0; left &= left - 1) {
        const int j = std::countr_zero(left);
        const float weight = p.scores[r * kTokens + j];
        for (int c = 0; c < D; c += kLanes) lanes(out + c) += weight * lanes(p.v + j * D + c);
      }
    }
  }
}

// Fills p.k and p.v with KV rows first to first + kTokens - 1 and zeros for those at or behind `end`, or on a page that
// is none; returns which of them are there.
template <class T>
uint64_t gather_tile(Pass& pass, const TreeAttentionParams& p, const Request& r, int64_t head, int64_t first,
                     int64_t end, int32_t& status) {
  const int D = pass.head_dim;
  const RowDivmod page_size{static_cast<int>(p.rows.page_size)};
  const T* k_rows[kTokens];
  static const T kZeros[256] = {};
  uint64_t there = 0;
  for (int j = 0; j < kTokens; ++j) {
    const T* v = kZeros;
    k_rows[j] = kZeros;
    if (first + j < end) {
      const KvRow at = find_row(p.rows, page_size, r.slot, first + j);
      status |= at.bits;
      if (at.bits == 0) {
        k_rows[j] = static_cast<const T*>(p.k_pool) + row_start(p.k_strides, at, head);
        v = static_cast<const T*>(p.v_pool) + row_start(p.v_strides, at, head);
        there |= uint64_t{1} << j;
      }
    }
    for (int d = 0; d < D; ++d) pass.v[j * D + d] = to_float(v[d]);
  }
  for (int d = 0; d < D; ++d)
    for (int j = 0; j < kTokens; ++j) pass.k[d * kTokens + j] = to_float(k_rows[j][d]);
  return there;
}

// Rows [begin, begin + count) of a request and KV head, where row n is query row n / G, head n % G of its group.
template <class T>
int32_t attend_rows(Pass& pass, const TreeAttentionParams& p, const Request& r, int64_t head, int64_t begin,
                    int64_t count) {
  const int64_t G = p.q_heads / p.kv_heads, D = p.head_dim;
  const int64_t valid = clamp_to(r.valid_rows * G - begin, int64_t{0}, count);
  int32_t status = 0;
  pass.rows = static_cast<int>((valid + kGroup - 1) / kGroup * kGroup);
  pass.head_dim = static_cast<int>(D);
  std::fill_n(pass.q, pass.rows * D, 0.0f);
  std::fill_n(pass.out, pass.rows * D, 0.0f);
  std::fill_n(pass.max, pass.rows, kNone);
  std::fill_n(pass.sum, pass.rows, 0.0f);
  for (int64_t n = 0; n < valid; ++n) {
    const int64_t i = (begin + n) / G, h = head * G + (begin + n) % G;
    const T* q = static_cast<const T*>(p.q) + r.q_start + i * p.q_strides.row + h * p.q_strides.head;
    for (int64_t d = 0; d < D; ++d) pass.q[n * D + d] = to_float(q[d]) * p.log2_scale;
  }

  const int64_t end = valid > 0 ? visible_end(p, r, (begin + valid - 1) / G) : 0;
  for (int64_t first = 0; first < end; first += kTokens) {
    const uint64_t there = gather_tile<T>(pass, p, r, head, first, end, status);
    for (int64_t n = 0; n < valid; ++n) pass.seen[n] = there & visible_word(p, r, (begin + n) / G, first);
    // Padding sees what the row before it sees, which keeps its group on the short path.
    for (int64_t n = valid; n < pass.rows; ++n) pass.seen[n] = pass.seen[n - 1];
    attend_tile(pass);
  }

  for (int64_t n = 0; n < count; ++n) {
    const int64_t i = (begin + n) / G, h = head * G + (begin + n) % G;
    T* out = static_cast<T*>(p.out) + r.out_start + i * p.out_strides.row + h * p.out_strides.head;
    const float sum = n < valid ? pass.sum[n] : 0.0f;
    for (int64_t d = 0; d < D; ++d) out[d] = from_float<T>(sum == 0 ? 0.0f : pass.out[n * D + d] / sum);
    if (p.lse)
      p.lse[(r.flat_row + i) * p.q_heads + h] = sum == 0 ? kNone : (pass.max[n] + std::log2(sum)) * 0.6931471805599453f;
  }
  return status;
}

}  // namespace

void tree_attention_cpu(const TreeAttentionParams& p) {
  // Aligned scratch, kept for the life of the thread.
  struct alignas(64) Line {
    float x[16];
  };
  thread_local std::vector<Line> scratch;
  const int64_t D = p.head_dim;
  const int64_t sizes[] = {kRows * D, D * kTokens, kTokens * D, kRows * kTokens, kRows * D};
  int64_t floats = 0;
  for (int64_t size : sizes) floats += size;
  if (scratch.size() * 16 < static_cast<size_t>(floats)) scratch.resize(floats / 16);
  Pass pass{};
  float* next = scratch[0].x;
  float** parts[] = {&pass.q, &pass.k, &pass.v, &pass.scores, &pass.out};
  for (int n = 0; n < 5; ++n) {
    *parts[n] = next;
    next += sizes[n];
  }

  with_float_type(p.dtype, [&]<class T>() {
    const int64_t G = p.q_heads / p.kv_heads, requests = p.batch + (p.cu_seqlens_q != nullptr);
    for (int64_t b = 0; b < requests; ++b) {
      const Request r = request_of(p, b);
      int32_t status = r.status;
      for (int64_t head = 0; head < p.kv_heads; ++head)
        for (int64_t begin = 0; begin < r.rows * G; begin += kRows)
          status |= attend_rows<T>(pass, p, r, head, begin, std::min<int64_t>(kRows, r.rows * G - begin));
      set_status(p.status, r.slot, status);
    }
  });
}

}  // namespace specdec
