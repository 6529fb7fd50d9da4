#include "layers/norm/rms_norm_concat.h"

#include <algorithm>

#include "core/bytes.h"
#include "layers/norm/rms_norm_row.h"

namespace specdec::layers {

void rms_norm_concat(CallStream stream, const TensorView& embeddings, const TensorView& tokens,
                     const TensorView& embedding_weight, const TensorView& features, const OptTensor& feature_rows,
                     const TensorView& feature_weight, double eps, const TensorView& out,
                     const TensorView& out_features) {
  Check check("rms_norm_concat");
  Dim V{"vocab"}, H{"width"}, T{"rows"}, F{"num_features"};
  check.strided("embeddings", embeddings, {V, H}, kFloats);
  const Dtypes dtype = dtype_of(embeddings);
  check.range("width", H, 1, INT32_MAX / 2);
  check.tensor("tokens", tokens, {T}, kInt32);
  check.tensor("embedding_weight", embedding_weight, {H}, dtype);
  check.strided("features", features, {F, H}, dtype);
  check.tensor("feature_rows", feature_rows, {T}, kInt32);
  check.tensor("feature_weight", feature_weight, {H}, dtype);
  const float epsilon = check.factor("eps", eps);
  check.strided_output("out[0]", out, {T, 2 * H}, dtype);
  check.strided_output("out[1]", out_features, {T, H}, dtype);
  if (T == 0) return;
  check.range("vocab", V, 1, INT32_MAX);
  check.range("num_features", F, feature_rows ? 1 : static_cast<int64_t>(T), INT32_MAX);

  const RmsNormConcatParams params{
      .embeddings = embeddings.data<void>(),
      .tokens = tokens.data<int32_t>(),
      .embedding_weight = embedding_weight.data<void>(),
      .features = features.data<void>(),
      .feature_rows = data_or_null<const int32_t>(feature_rows),
      .feature_weight = feature_weight.data<void>(),
      .out = out.data<void>(),
      .out_features = out_features.data<void>(),
      .rows = T,
      .width = H,
      .vocab = V,
      .num_features = F,
      .embeddings_stride = embeddings.stride(0),
      .features_stride = features.stride(0),
      .out_stride = out.stride(0),
      .out_features_stride = out_features.stride(0),
      .eps = epsilon,
      .dtype = dtype,
      .vectorized = H * item_bytes(out) % 16 == 0 &&  // both halves of a row of `out`
                    copy_unit({&embeddings, &embedding_weight, &features, &feature_weight, &out, &out_features}) == 16,
  };
  SD_DISPATCH(check, stream, rms_norm_concat, params);
}

void rms_norm_concat_cpu(const RmsNormConcatParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    const auto norm = [&](const T* x, const void* weight, T* out) {
      rms_norm_row_cpu(x, static_cast<const T*>(weight), p.width, p.eps, out);
    };
    for (int64_t row = 0; row < p.rows; ++row) {
      T* const out_row = static_cast<T*>(p.out) + row * p.out_stride;
      norm(static_cast<const T*>(p.embeddings) + embedding_of(p, row) * p.embeddings_stride, p.embedding_weight,
           out_row);
      const T* const feature = static_cast<const T*>(p.features) + feature_of(p, row) * p.features_stride;
      norm(feature, p.feature_weight, out_row + p.width);
      std::copy(feature, feature + p.width, static_cast<T*>(p.out_features) + row * p.out_features_stride);
    }
  });
}

}  // namespace specdec::layers
