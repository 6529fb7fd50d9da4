#include "layers/moe/moe_combine.h"

#include "core/bytes.h"
#include "layers/gemm/small_m_gemm.h"

namespace specdec::layers {

void moe_combine(CallStream stream, const TensorView& made, const TensorView& shares, const TensorView& out) {
  Check check("moe_combine");
  Dim T{"rows"}, J{"taken"}, W{"width"};
  check.tensor("shares", shares, {T, J}, kFloat32);
  check.range("taken", J, 1, kMaxSmallMGemm);
  Dim M{"rows * taken", T * J};
  check.strided("made", made, {M, W}, kFloats);
  check.range("width", W, 1, INT32_MAX);
  check.strided_output("out", out, {T, W}, dtype_of(made));
  if (T == 0) return;

  const MoeCombineParams params{
      .made = made.data<void>(),
      .shares = shares.data<float>(),
      .out = out.data<void>(),
      .rows = T,
      .taken = J,
      .width = W,
      .made_stride = made.stride(0),
      .out_stride = out.stride(0),
      .dtype = dtype_of(made),
      .wide = copy_unit({&made, &out}) == 16 && W * item_bytes(made) % 16 == 0,
  };
  SD_DISPATCH(check, stream, moe_combine, params);
}

void moe_combine_cpu(const MoeCombineParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    for (int64_t row = 0; row < p.rows; ++row) {
      auto* const out = static_cast<T*>(p.out) + row * p.out_stride;
      for (int64_t i = 0; i < p.width; ++i) {
        float sum = 0;
        for (int64_t j = row * p.taken; j < (row + 1) * p.taken; ++j)
          sum += p.shares[j] * to_float(static_cast<const T*>(p.made)[j * p.made_stride + i]);
        out[i] = from_float<T>(sum);
      }
    }
  });
}

}  // namespace specdec::layers
