#include "layers/rope/rope_qkv_write_kv.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/bytes.h"
#include "kv/pool_view.h"

namespace specdec::layers {

void rope_qkv_write_kv(CallStream stream, const TensorView& qkv, const TensorView& cos_sin, const TensorView& positions,
                       const TensorView& k_pool, const TensorView& v_pool, const TensorView& page_table,
                       const TensorView& prefix_lens, int64_t row_offset, const OptTensor& slots,
                       const OptTensor& num_valid, const OptTensor& cu_seqlens_q, const OptTensor& q_norm,
                       const OptTensor& k_norm, double eps, const OptTensor& page_refs, double k_scale, double v_scale,
                       const OptTensor& status, const TensorView& out_q) {
  Check check("rope_qkv_write_kv");
  Dim B{"batch"}, Q{"q_len"}, A{"query_heads + 2 * heads"}, Hq{"query_heads"}, H{"heads"}, D{"head_dim"};
  Dim X{"num_positions"}, T{"rows"};
  const bool packed = cu_seqlens_q.has_value();
  if (packed)
    check.strided("qkv", qkv, {T, A, D}, kFloats);
  else
    check.strided("qkv", qkv, {B, Q, A, D}, kFloats);
  const Dtypes dtype = dtype_of(qkv);
  check.that(D == 64 || D == 128 || D == 256, "head_dim", {"is ", D}, "64, 128 or 256");
  check.tensor("cos_sin", cos_sin, {X, D}, kFloat32);
  check.range("num_positions", X, 1, std::numeric_limits<int32_t>::max());
  if (packed)
    check.tensor("positions", positions, {T}, kInt32);
  else
    check.tensor("positions", positions, {B, Q}, kInt32);
  check.packed("cu_seqlens_q", cu_seqlens_q, B);
  const kv::KvDestination to{k_pool,    v_pool,    page_table, prefix_lens, row_offset, slots,
                             num_valid, page_refs, k_scale,    v_scale,     status};
  kv::WriteKvParams write = to.check(check, B, H, D, dtype);
  check.range("heads", H, 1, kv::kMaxRowItems / D);
  check.range("query_heads + 2 * heads", A, 2 * H + 1, kv::kMaxRowItems / D);
  check.tensor("q_norm", q_norm, {D}, dtype);
  check.tensor("k_norm", k_norm, {D}, dtype);
  const float epsilon = check.factor("eps", eps);
  Hq.value = A - 2 * H;
  if (packed)
    check.output("out", out_q, {T, Hq, D}, dtype);
  else
    check.output("out", out_q, {B, Q, Hq, D}, dtype);
  const int64_t num_rows = packed ? T.value : B * Q;
  if (num_rows == 0) return;

  const kv::NewRows heads = kv::new_rows(qkv, packed);
  const auto from_head = [&](int64_t head) {
    kv::NewRows rows = heads;
    rows.data += head * heads.head_stride;
    return rows;
  };
  write.k = from_head(Hq);
  write.v = from_head(Hq + H);
  write.cu_seqlens_q = data_or_null<const int32_t>(cu_seqlens_q);
  write.q_len = packed ? T : Q;
  write.head_bytes = D * item_bytes(qkv);
  // Bytes that a lane of the kernel reads and writes at once.
  write.unit =
      copy_unit({&qkv, &k_pool, &v_pool, &out_q, &cos_sin, q_norm ? &*q_norm : &qkv, k_norm ? &*k_norm : &qkv});
  const RopeQkvWriteKvParams params{
      .write = write,
      .q = heads,
      .out_q = bytes(out_q),
      .cos_sin = cos_sin.data<float>(),
      .positions = positions.data<int32_t>(),
      .q_norm = data_or_null<void>(q_norm),
      .k_norm = data_or_null<void>(k_norm),
      .num_rows = num_rows,
      .query_heads = Hq,
      .head_dim = D,
      .num_positions = X,
      .eps = epsilon,
  };
  SD_DISPATCH(check, stream, rope_qkv_write_kv, params);
}

namespace {

// Apply RMSNorm (if `norm` is given) and RoPE to a head. Elements d and d + head_dim / 2 are rotated together (NeoX
// style).
template <class T>
void rope_head(const RopeQkvWriteKvParams& p, const T* head, const T* norm, const float* cos_sin_row,
               std::vector<float>& out) {
  const int64_t half = p.head_dim / 2;
  for (int64_t d = 0; d < p.head_dim; ++d) out[d] = to_float(head[d]);
  if (norm) {
    double squares = 0;
    for (const float x : out) squares += static_cast<double>(x) * x;
    const float scale = 1 / std::sqrt(static_cast<float>(squares / static_cast<double>(p.head_dim)) + p.eps);
    for (int64_t d = 0; d < p.head_dim; ++d) out[d] *= scale * to_float(norm[d]);
  }
  for (int64_t d = 0; d < half; ++d) {
    const float x = out[d], y = out[half + d], cosine = cos_sin_row[d], sine = cos_sin_row[half + d];
    out[d] = x * cosine - y * sine;
    out[half + d] = y * cosine + x * sine;
  }
}

template <class T>
void store_head(const std::vector<float>& values, char* to, bool quantize, float scale) {
  for (size_t d = 0; d < values.size(); ++d) {
    if (quantize)
      reinterpret_cast<Float8*>(to)[d] = kv::to_float8(values[d], scale);
    else
      reinterpret_cast<T*>(to)[d] = from_float<T>(values[d]);
  }
}

template <class T>
void write_row(const RopeQkvWriteKvParams& p, const kv::RowsToWrite& r, int64_t b, int64_t j, const float* cos_sin_row,
               std::vector<float>& values) {
  const kv::WriteKvParams& w = p.write;
  const kv::KvRow to =
      find_own_row(w.rows, kv::RowDivmod{static_cast<int>(w.rows.page_size)}, r.slot, r.start + w.row_offset + j);
  if (to.bits) return set_status(w.status, r.slot, to.bits);
  for (int64_t h = 0; h < w.heads; ++h) {
    const char* const k = row_data(w.k, b, r.first + j) + h * w.k.head_stride;
    rope_head(p, reinterpret_cast<const T*>(k), static_cast<const T*>(p.k_norm), cos_sin_row, values);
    store_head<T>(values, row_data(w.k_pool, to) + h * w.k_pool.head_stride, w.quantize, w.k_scale);
    const auto* const v = reinterpret_cast<const T*>(row_data(w.v, b, r.first + j) + h * w.v.head_stride);
    for (int64_t d = 0; d < p.head_dim; ++d) values[d] = to_float(v[d]);
    store_head<T>(values, row_data(w.v_pool, to) + h * w.v_pool.head_stride, w.quantize, w.v_scale);
  }
}

}  // namespace

void rope_qkv_write_kv_cpu(const RopeQkvWriteKvParams& p) {
  with_float_type(p.write.dtype, [&]<class T>() {
    std::vector<float> values(p.head_dim);
    const int64_t row_bytes = p.query_heads * p.write.head_bytes;
    for (int64_t row = 0; row < p.num_rows; ++row) {
      const auto [b, j] =
          p.write.cu_seqlens_q ? packed_request_row(p, row) : RequestRow{row / p.write.q_len, row % p.write.q_len};
      if (b < 0) {  // padding row
        std::memset(p.out_q + row * row_bytes, 0, row_bytes);
        continue;
      }
      const kv::RowsToWrite r = rows_to_write(p.write, b);
      if (r.bits && j == 0) set_status(p.write.status, r.slot, r.bits);
      const float* const cos_sin_row = cos_sin_of(p, p.positions[row]);
      for (int64_t h = 0; h < p.query_heads; ++h) {
        const char* const q = row_data(p.q, b, r.first + j) + h * p.q.head_stride;
        rope_head(p, reinterpret_cast<const T*>(q), static_cast<const T*>(p.q_norm), cos_sin_row, values);
        store_head<T>(values, p.out_q + row * row_bytes + h * p.write.head_bytes, false, 1);
      }
      if (j < r.count) write_row<T>(p, r, b, j, cos_sin_row, values);
    }
  });
}

}  // namespace specdec::layers
