#include "mla/rope_heads.h"

#include <limits>

#include "core/bytes.h"

namespace specdec::mla {

void rope_heads(CallStream stream, const TensorView& x, const TensorView& cos_sin, const TensorView& positions,
                bool interleaved, const TensorView& out) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  Check check("rope_heads");
  Dim T{"rows"}, H{"heads"}, E{"rope_dim"}, X{"num_positions"};
  check.strided("x", x, {T, H, E}, kFloats);
  check.that(E % 2 == 0 && E > 0, "rope_dim", {"is ", E}, "an even number above 0");
  check.range("rows * heads * rope_dim / 2", T * H * (E / 2), 0, kMost / 2);
  check.tensor("cos_sin", cos_sin, {X, E}, kFloat32);
  check.range("num_positions", X, 1, kMost);
  check.tensor("positions", positions, {T}, kInt32);
  check.strided_output("out", out, {T, H, E}, dtype_of(x));
  if (T == 0 || H == 0) return;
  const RopeHeadsParams params{
      .x = bytes(x),
      .out = bytes(out),
      .cos_sin = cos_sin.data<float>(),
      .positions = positions.data<int32_t>(),
      .rows = T,
      .heads = H,
      .rope_dim = E,
      .num_positions = X,
      .x_strides = {byte_stride(x, 0), byte_stride(x, 1)},
      .out_strides = {byte_stride(out, 0), byte_stride(out, 1)},
      .dtype = dtype_of(x),
      .interleaved = interleaved,
  };
  SD_DISPATCH(check, stream, rope_heads, params);
}

void rope_heads_cpu(const RopeHeadsParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    for (int64_t row = 0; row < p.rows; ++row)
      for (int64_t head = 0; head < p.heads; ++head)
        for (int64_t i = 0; i < p.rope_dim / 2; ++i) rope_pair<T>(p, row, head, i);
  });
}

}  // namespace specdec::mla
