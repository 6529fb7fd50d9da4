// rms_norm_concat: the input of an EAGLE-3 layer, i.e. token embeddings and target features, each RMS-normalized and
// concatenated.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"
#include "core/host_device.h"

namespace specdec::layers {

struct RmsNormConcatParams {
  const void* embeddings;        // [vocab, width]
  const int32_t* tokens;         // [rows]
  const void* embedding_weight;  // [width]
  const void* features;          // [num_features, width]
  const int32_t* feature_rows;   // [rows], or null: row i reads feature i
  const void* feature_weight;    // [width]
  void* out;                     // [rows, 2 * width]
  void* out_features;            // [rows, width]
  int64_t rows, width, vocab, num_features;
  int64_t embeddings_stride, features_stride, out_stride, out_features_stride;  // between rows, in elements
  float eps;
  Dtypes dtype;
  bool vectorized;  // all rows allow 16-byte accesses
};

// Return a row index clamped to the table.
SD_HD int64_t clamped_row(int32_t row, int64_t count) { return clamp_to(int64_t{row}, 0, count - 1); }
SD_HD int64_t embedding_of(const RmsNormConcatParams& p, int64_t row) { return clamped_row(p.tokens[row], p.vocab); }
SD_HD int64_t feature_of(const RmsNormConcatParams& p, int64_t row) {
  return p.feature_rows ? clamped_row(p.feature_rows[row], p.num_features) : row;
}

void rms_norm_concat(CallStream stream, const TensorView& embeddings, const TensorView& tokens,
                     const TensorView& embedding_weight, const TensorView& features, const OptTensor& feature_rows,
                     const TensorView& feature_weight, double eps, const TensorView& out,
                     const TensorView& out_features);

void rms_norm_concat_cpu(const RmsNormConcatParams& p);
void rms_norm_concat_cuda(const RmsNormConcatParams& p, Stream stream);

}  // namespace specdec::layers
