#include "layers/activation/silu_and_mul.h"

#include "core/bytes.h"

namespace specdec::layers {

void silu_and_mul(CallStream stream, const TensorView& x, const TensorView& out) {
  Check check("silu_and_mul");
  Dim T{"rows"}, W{"2 * width"}, I{"width"};
  check.strided("x", x, {T, W}, kFloats);
  check.range("2 * width", W, 2, INT32_MAX);
  I.value = W / 2;
  check.that(W % 2 == 0, "2 * width", {"is ", W}, "an even number");
  check.strided_output("out", out, {T, I}, dtype_of(x));
  if (T == 0) return;

  const SiluAndMulParams params{
      .x = x.data<void>(),
      .out = out.data<void>(),
      .rows = T,
      .width = I,
      .x_stride = x.stride(0),
      .out_stride = out.stride(0),
      .dtype = dtype_of(x),
      .vectorized = copy_unit({&x, &out}) == 16 && I * item_bytes(x) % 16 == 0,
  };
  SD_DISPATCH(check, stream, silu_and_mul, params);
}

void silu_and_mul_cpu(const SiluAndMulParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    for (int64_t row = 0; row < p.rows; ++row) {
      const auto* gate = static_cast<const T*>(p.x) + row * p.x_stride;
      auto* out = static_cast<T*>(p.out) + row * p.out_stride;
      for (int64_t i = 0; i < p.width; ++i)
        out[i] = from_float<T>(silu_mul(to_float(gate[i]), to_float(gate[p.width + i])));
    }
  });
}

}  // namespace specdec::layers
