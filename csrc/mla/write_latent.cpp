#include "mla/write_latent.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/bytes.h"
#include "core/packed_rows.h"
#include "kv/pool_view.h"

namespace specdec::mla {
namespace {

// Return rows [batch, q_len, width] or [num_rows, width].
kv::NewRows rows_of(const TensorView& t, bool packed) {
  return {.data = bytes(t),
          .batch_stride = packed ? 0 : byte_stride(t, 0),
          .row_stride = byte_stride(t, packed ? 0 : 1),
          .head_stride = 0};
}

}  // namespace

void write_latent(CallStream stream, const TensorView& x, const TensorView& norm, double eps, const TensorView& kv_pool,
                  const TensorView& page_table, const TensorView& prefix_lens, const OptTensor& cos_sin,
                  const OptTensor& positions, bool interleaved, int64_t row_offset, const OptTensor& slots,
                  const OptTensor& num_valid, const OptTensor& cu_seqlens_q, const OptTensor& page_refs,
                  double kv_scale, const OptTensor& q, const OptTensor& q_norm, const OptTensor& q_out,
                  const OptTensor& status) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  Check check("write_latent");
  Dim B{"batch"}, Q{"q_len"}, T{"rows"}, W{"latent_dim + rope_dim"}, L{"latent_dim"}, E{"rope_dim"}, X{"num_positions"};
  Dim P{"num_pages"}, Z{"page_size"}, R{"num_slots"}, M{"max_pages"}, C{"q_width"};
  const bool packed = cu_seqlens_q.has_value();
  const auto rows = [&](const char* name, const TensorView& t, Dim& width, Dtypes dtypes) {
    packed ? check.strided(name, t, {T, width}, dtypes) : check.strided(name, t, {B, Q, width}, dtypes);
  };
  rows("x", x, W, kFloats);
  const Dtypes dtype = dtype_of(x);
  check.tensor("norm", norm, {L}, dtype);
  check.range("latent_dim", L, 1, kMaxNormWidth);
  check.range("rope_dim", W - L, 0, kMaxNormWidth);
  E.value = W - L;
  const float epsilon = check.factor("eps", eps);
  check.strided_output("kv_pool", kv_pool, {P, Z, W}, dtype | kFloat8);
  check.range("page_size", Z, 1, kMost);
  check.tensor("page_table", page_table, {R, M}, kInt32);
  check.tensor("prefix_lens", prefix_lens, {R}, kInt32);
  check.that(cos_sin.has_value() == positions.has_value(), "positions", {positions ? "is given" : "is missing"},
             {cos_sin ? "some with cos_sin" : "none without cos_sin"});
  if (cos_sin) {
    check.that(E % 2 == 0, "rope_dim", {"is ", E}, "an even number with cos_sin");
    check.tensor("cos_sin", cos_sin, {X, E}, kFloat32);
    check.range("num_positions", X, 1, kMost);
    packed ? check.tensor("positions", *positions, {T}, kInt32) : check.tensor("positions", *positions, {B, Q}, kInt32);
  }
  check.range("row_offset", row_offset, -kMost, kMost);
  check.packed("cu_seqlens_q", cu_seqlens_q, B);
  check.slots(slots, B, R);
  check.tensor("num_valid", num_valid, {B}, kInt32);
  check.tensor("page_refs", page_refs, {P}, kInt32);
  const float scale = kv::pool_scale(check, "kv_scale", kv_scale, kv_pool);
  for (const auto& [name, t] : {std::pair{"q_norm", &q_norm}, std::pair{"q_out", &q_out}})
    check.that(q.has_value() == t->has_value(), name, {*t ? "is given" : "is missing"},
               {q ? "some with q" : "none without q"});
  if (q) {
    rows("q", *q, C, dtype);
    check.range("q_width", C, 1, kMaxNormWidth);
    check.tensor("q_norm", q_norm, {C}, dtype);
    packed ? check.output("q_out", q_out, {T, C}, dtype) : check.output("q_out", q_out, {B, Q, C}, dtype);
  }
  check.output("status", status, {R}, kInt32);
  const int64_t num_rows = packed ? T.value : B * Q;
  if (num_rows == 0) return;

  kv::WriteKvParams write{};
  write.k = rows_of(x, packed);
  write.k_pool = {.data = bytes(kv_pool),
                  .page_stride = byte_stride(kv_pool, 0),
                  .row_stride = byte_stride(kv_pool, 1),
                  .head_stride = 0};
  write.rows = {.page_table = page_table.data<int32_t>(),
                .page_refs = data_or_null<const int32_t>(page_refs),
                .max_pages = M,
                .num_pages = P,
                .page_size = Z};
  write.prefix_lens = prefix_lens.data<int32_t>();
  write.row_offset = row_offset;
  write.slots = data_or_null<const int32_t>(slots);
  write.num_valid = data_or_null<const int32_t>(num_valid);
  write.cu_seqlens_q = data_or_null<const int32_t>(cu_seqlens_q);
  write.status = data_or_null<int32_t>(status);
  write.batch = B;
  write.q_len = packed ? T : Q;
  write.num_slots = R;
  write.quantize = !(dtype == dtype_of(kv_pool));
  write.dtype = dtype;
  write.k_scale = scale;
  // Bytes that a thread reads at once.
  write.unit = q ? copy_unit({&x, &norm, &*q, &*q_norm, &*q_out}) : copy_unit({&x, &norm});
  if (!write.quantize) write.unit = std::min(write.unit, copy_unit({&kv_pool}));
  const WriteLatentParams params{
      .write = write,
      .norm = norm.data<void>(),
      .cos_sin = data_or_null<const float>(cos_sin),
      .positions = data_or_null<const int32_t>(positions),
      .q = q ? rows_of(*q, packed) : kv::NewRows{},
      .q_norm = data_or_null<const void>(q_norm),
      .q_out = q ? bytes(*q_out) : nullptr,
      .num_rows = num_rows,
      .latent_dim = L,
      .rope_dim = E,
      .num_positions = cos_sin ? X.value : 0,
      .q_width = q ? C.value : 0,
      .eps = epsilon,
      .interleaved = interleaved,
  };
  SD_DISPATCH(check, stream, write_latent, params);
}

namespace {

// Return what a row is multiplied by to normalize it, next to its weight.
template <class T>
float norm_factor(const T* row, int64_t width, float eps) {
  double squares = 0;
  for (int64_t d = 0; d < width; ++d) squares += static_cast<double>(to_float(row[d])) * to_float(row[d]);
  return 1 / std::sqrt(static_cast<float>(squares / static_cast<double>(width)) + eps);
}

template <class T>
void store(const WriteLatentParams& p, char* to, int64_t d, float value) {
  if (p.write.quantize)
    reinterpret_cast<Float8*>(to)[d] = kv::to_float8(value, p.write.k_scale);
  else
    reinterpret_cast<T*>(to)[d] = from_float<T>(value);
}

template <class T>
void write_row(const WriteLatentParams& p, int64_t row, const T* from, char* to) {
  const float factor = norm_factor(from, p.latent_dim, p.eps);
  const T* const norm = static_cast<const T*>(p.norm);
  for (int64_t d = 0; d < p.latent_dim; ++d) store<T>(p, to, d, to_float(from[d]) * factor * to_float(norm[d]));
  const T* const rope = from + p.latent_dim;
  const int64_t half = p.rope_dim / 2;
  if (!p.cos_sin) {
    for (int64_t d = 0; d < p.rope_dim; ++d) store<T>(p, to, p.latent_dim + d, to_float(rope[d]));
    return;
  }
  const float* const turn = cos_sin_of(p.cos_sin, p.positions[row], p.num_positions, p.rope_dim);
  for (int64_t i = 0; i < half; ++i) {
    const RotatedPair pair = rotated_pair(i, half, p.interleaved);
    const float a = to_float(rope[pair.first]), b = to_float(rope[pair.second]);
    store<T>(p, to, p.latent_dim + i, a * turn[i] - b * turn[half + i]);
    store<T>(p, to, p.latent_dim + half + i, b * turn[i] + a * turn[half + i]);
  }
}

}  // namespace

void write_latent_cpu(const WriteLatentParams& p) {
  const kv::WriteKvParams& w = p.write;
  with_float_type(w.dtype, [&]<class T>() {
    for (int64_t row = 0; row < p.num_rows; ++row) {
      int64_t b = w.cu_seqlens_q ? request_of_row(w.cu_seqlens_q, w.batch, row) : row / w.q_len;
      const int64_t in_request = w.cu_seqlens_q ? row : row % w.q_len;
      if (p.q.data) {
        const T* const q = reinterpret_cast<const T*>(row_data(p.q, w.cu_seqlens_q ? 0 : b, in_request));
        T* const out = reinterpret_cast<T*>(p.q_out) + row * p.q_width;
        const float factor = norm_factor(q, p.q_width, p.eps);
        for (int64_t d = 0; d < p.q_width; ++d)
          out[d] = from_float<T>(to_float(q[d]) * factor * to_float(static_cast<const T*>(p.q_norm)[d]));
      }
      if (b < 0) continue;
      const kv::RowsToWrite r = rows_to_write(w, b);
      const int64_t j = w.cu_seqlens_q ? row - w.cu_seqlens_q[b] : in_request;
      if (r.bits && j == 0) set_status(w.status, r.slot, r.bits);
      if (j >= r.count) continue;
      const kv::KvRow to =
          find_own_row(w.rows, kv::RowDivmod{static_cast<int>(w.rows.page_size)}, r.slot, r.start + w.row_offset + j);
      if (to.bits) {
        set_status(w.status, r.slot, to.bits);
        continue;
      }
      write_row(p, row, reinterpret_cast<const T*>(row_data(w.k, b, in_request)), row_data(w.k_pool, to));
    }
  });
}

}  // namespace specdec::mla
