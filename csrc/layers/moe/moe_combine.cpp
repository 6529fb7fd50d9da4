#include "layers/moe/moe_combine.h"

#include "core/bytes.h"
#include "layers/gemm/small_m_gemm.h"

namespace specdec::layers {

void moe_combine(CallStream stream, const TensorView& expert_outputs, const TensorView& topk_weights,
                 const TensorView& out) {
  Check check("moe_combine");
  Dim T{"rows"}, J{"top_k"}, W{"width"};
  check.tensor("topk_weights", topk_weights, {T, J}, kFloat32);
  check.range("top_k", J, 1, kMaxSmallMRows);
  Dim M{"rows * top_k", T * J};
  check.strided("expert_outputs", expert_outputs, {M, W}, kFloats);
  check.range("width", W, 1, INT32_MAX);
  check.strided_output("out", out, {T, W}, dtype_of(expert_outputs));
  if (T == 0) return;

  const MoeCombineParams params{
      .expert_outputs = expert_outputs.data<void>(),
      .topk_weights = topk_weights.data<float>(),
      .out = out.data<void>(),
      .rows = T,
      .top_k = J,
      .width = W,
      .expert_outputs_stride = expert_outputs.stride(0),
      .out_stride = out.stride(0),
      .dtype = dtype_of(expert_outputs),
      .vectorized = copy_unit({&expert_outputs, &out}) == 16 && W * item_bytes(expert_outputs) % 16 == 0,
  };
  SD_DISPATCH(check, stream, moe_combine, params);
}

void moe_combine_cpu(const MoeCombineParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    for (int64_t row = 0; row < p.rows; ++row) {
      auto* const out = static_cast<T*>(p.out) + row * p.out_stride;
      for (int64_t i = 0; i < p.width; ++i) {
        float sum = 0;
        for (int64_t j = row * p.top_k; j < (row + 1) * p.top_k; ++j)
          sum += p.topk_weights[j] * to_float(static_cast<const T*>(p.expert_outputs)[j * p.expert_outputs_stride + i]);
        out[i] = from_float<T>(sum);
      }
    }
  });
}

}  // namespace specdec::layers
