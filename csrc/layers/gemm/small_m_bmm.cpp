#include "layers/gemm/small_m_bmm.h"

#include <climits>

#include "core/bytes.h"

namespace specdec::layers {

void small_m_bmm(CallStream stream, const TensorView& x, const TensorView& weight, const TensorView& out) {
  Check check("small_m_bmm");
  Dim M{"rows"}, H{"heads"}, K{"in_features"}, N{"out_features"};
  check.strided("x", x, {M, H, K}, kFloat16 | kBFloat16);
  check.range("rows", M, 0, kMaxSmallMBmmRows);
  check.range("heads", H, 0, kMaxSmallMBmmHeads);
  check.range("in_features", K, 32, kMaxSmallMBmmIns);
  check.that(K % 32 == 0, "in_features", {"is ", K}, "a multiple of 32");
  check.matrices("weight", weight, {H, K, N}, dtype_of(x));
  check.range("out_features", N, 16, INT32_MAX);
  check.that(N % 16 == 0, "out_features", {"is ", N}, "a multiple of 16");
  check.strided_output("out", out, {M, H, N}, dtype_of(x));
  const SmallMBmmParams params{
      .x = x.data<void>(),
      .weight = weight.data<void>(),
      .out = out.data<void>(),
      .rows = M,
      .heads = H,
      .ins = K,
      .outs = N,
      .x_strides = {x.stride(0), x.stride(1)},
      .out_strides = {out.stride(0), out.stride(1)},
      .weight_strides = {weight.stride(0), weight.stride(1), weight.stride(2)},
      .dtype = dtype_of(x),
  };
  // Of the weight's two last strides the one that is not 1 separates rows.
  const int64_t between_rows = byte_stride(weight, weight.stride(2) == 1 ? 1 : 2);
  const auto weight_starts = reinterpret_cast<uintptr_t>(bytes(weight)) | byte_stride(weight, 0) | between_rows;
  for (const auto& [name, aligned] : {std::pair{"x", copy_unit({&x}) == 16}, {"weight", weight_starts % 16 == 0}})
    check.that(aligned, name, "has rows off 16 bytes", "rows that start on 16 bytes");
  if (M == 0 || H == 0) return;
  SD_DISPATCH(check, stream, small_m_bmm, params);
}

void small_m_bmm_cpu(const SmallMBmmParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    for (int64_t row = 0; row < p.rows; ++row)
      for (int64_t head = 0; head < p.heads; ++head) {
        const T* const x = static_cast<const T*>(p.x) + row * p.x_strides[0] + head * p.x_strides[1];
        T* const out = static_cast<T*>(p.out) + row * p.out_strides[0] + head * p.out_strides[1];
        const T* const weight = static_cast<const T*>(p.weight) + head * p.weight_strides[0];
        for (int64_t n = 0; n < p.outs; ++n) {
          float sum = 0;
          for (int64_t k = 0; k < p.ins; ++k)
            sum += to_float(x[k]) * to_float(weight[k * p.weight_strides[1] + n * p.weight_strides[2]]);
          out[n] = from_float<T>(sum);
        }
      }
  });
}

}  // namespace specdec::layers
