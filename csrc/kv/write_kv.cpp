#include "kv/write_kv.h"

#include <cstring>
#include <limits>

#include "kv/pool_view.h"

namespace specdec::kv {
NewRows new_rows(const TensorView& t, bool packed) {
  const int row = packed ? 0 : 1;
  return {.data = bytes(t),
          .batch_stride = packed ? 0 : byte_stride(t, 0),
          .row_stride = byte_stride(t, row),
          .head_stride = byte_stride(t, row + 1)};
}

namespace {

// Return the bytes per read when quantizing: four elements if they and their FP8 versions can each be moved at once,
// else one.
int64_t quantize_unit(const TensorView& k, const TensorView& v, const TensorView& k_pool, const TensorView& v_pool) {
  const int64_t item = item_bytes(k);
  return copy_unit({&k, &v}) >= 4 * item && copy_unit({&k_pool, &v_pool}) >= 4 ? 4 * item : item;
}

void write_head(const WriteKvParams& p, const char* from, char* to, float scale) {
  if (!p.quantize) {
    std::memcpy(to, from, p.head_bytes);
    return;
  }
  with_float_type(p.dtype, [&]<class T>() {
    for (int64_t d = 0; d < p.head_bytes / static_cast<int64_t>(sizeof(T)); ++d)
      reinterpret_cast<Float8*>(to)[d] = to_float8(reinterpret_cast<const T*>(from)[d], scale);
  });
}

}  // namespace

WriteKvParams KvDestination::check(Check& check, Dim& batch, Dim& heads, Dim& head_dim, Dtypes dtype) const {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  Dim P{"num_pages"}, Z{"page_size"}, R{"num_slots"}, M{"max_pages"};
  check.strided_output("k_pool", k_pool, {P, Z, heads, head_dim}, dtype | kFloat8);
  check.range("page_size", Z, 1, kMax);
  check.strided_output("v_pool", v_pool, {P, Z, heads, head_dim}, dtype_of(k_pool));
  check.tensor("page_table", page_table, {R, M}, kInt32);
  check.tensor("prefix_lens", prefix_lens, {R}, kInt32);
  check.range("row_offset", row_offset, -kMax, kMax);
  check.slots(slots, batch, R);
  check.tensor("num_valid", num_valid, {batch}, kInt32);
  check.tensor("page_refs", page_refs, {P}, kInt32);
  const float k_factor = pool_scale(check, "k_scale", k_scale, k_pool);
  const float v_factor = pool_scale(check, "v_scale", v_scale, v_pool);
  check.output("status", status, {R}, kInt32);
  WriteKvParams p{};
  p.k_pool = pool_view(k_pool, 0);
  p.v_pool = pool_view(v_pool, 0);
  p.rows = {.page_table = page_table.data<int32_t>(),
            .page_refs = data_or_null<const int32_t>(page_refs),
            .max_pages = M,
            .num_pages = P,
            .page_size = Z};
  p.prefix_lens = prefix_lens.data<int32_t>();
  p.row_offset = row_offset;
  p.slots = data_or_null<const int32_t>(slots);
  p.num_valid = data_or_null<const int32_t>(num_valid);
  p.status = data_or_null<int32_t>(status);
  p.batch = batch;
  p.num_slots = R;
  p.heads = heads;
  p.quantize = !(dtype == dtype_of(k_pool));  // FP8 rows are copied as they are
  p.dtype = dtype;
  p.k_scale = k_factor;
  p.v_scale = v_factor;
  return p;
}

void write_kv(CallStream stream, const TensorView& k, const TensorView& v, const TensorView& k_pool,
              const TensorView& v_pool, const TensorView& page_table, const TensorView& prefix_lens, int64_t row_offset,
              const OptTensor& slots, const OptTensor& num_valid, const OptTensor& cu_seqlens_q,
              const OptTensor& page_refs, double k_scale, double v_scale, const OptTensor& status) {
  Check check("write_kv");
  Dim B{"batch"}, Q{"q_len"}, T{"tokens"}, H{"heads"}, D{"head_dim"};
  const bool packed = cu_seqlens_q.has_value();
  if (packed)
    check.strided("k", k, {T, H, D}, kKvDtypes);
  else
    check.strided("k", k, {B, Q, H, D}, kKvDtypes);
  const Dtypes dtype = dtype_of(k);
  if (packed)
    check.strided("v", v, {T, H, D}, dtype);
  else
    check.strided("v", v, {B, Q, H, D}, dtype);
  check.range("heads * head_dim", H * D, 1, kMaxRowItems);
  check.packed("cu_seqlens_q", cu_seqlens_q, B);
  const KvDestination to{k_pool,    v_pool,    page_table, prefix_lens, row_offset, slots,
                         num_valid, page_refs, k_scale,    v_scale,     status};
  WriteKvParams params = to.check(check, B, H, D, dtype);
  if (B == 0) return;

  params.k = new_rows(k, packed);
  params.v = new_rows(v, packed);
  params.cu_seqlens_q = data_or_null<const int32_t>(cu_seqlens_q);
  params.q_len = packed ? T : Q;
  params.head_bytes = D * item_bytes(k);
  params.unit = params.quantize ? quantize_unit(k, v, k_pool, v_pool) : copy_unit({&k, &v, &k_pool, &v_pool});
  SD_DISPATCH(check, stream, write_kv, params);
}

void write_kv_cpu(const WriteKvParams& p) {
  const RowDivmod divmod{static_cast<int>(p.rows.page_size)};
  for (int64_t b = 0; b < p.batch; ++b) {
    const RowsToWrite r = rows_to_write(p, b);
    if (r.bits) set_status(p.status, r.slot, r.bits);
    for (int64_t j = 0; j < r.count; ++j) {
      const KvRow to = find_own_row(p.rows, divmod, r.slot, r.start + p.row_offset + j);
      if (to.bits) {
        set_status(p.status, r.slot, to.bits);
        continue;
      }
      for (int64_t h = 0; h < p.heads; ++h) {
        write_head(p, row_data(p.k, b, r.first + j) + h * p.k.head_stride,
                   row_data(p.k_pool, to) + h * p.k_pool.head_stride, p.k_scale);
        write_head(p, row_data(p.v, b, r.first + j) + h * p.v.head_stride,
                   row_data(p.v_pool, to) + h * p.v_pool.head_stride, p.v_scale);
      }
    }
  }
}

}  // namespace specdec::kv
