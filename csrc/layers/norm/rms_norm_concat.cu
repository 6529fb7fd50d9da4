// EAGLE-3 input: out = [rms_norm(embedding) | rms_norm(feature)], and a copy of the feature as the residual.
//
// Two blocks per row (rms_norm_row.cuh): blockIdx.y 0 normalizes the embedding, 1 the feature. Reads both rows and the
// weights, writes both outputs once. With few rows latency dominates: one launch and two dependent reads, the index and
// the row.
#include "layers/norm/rms_norm_concat.h"
#include "layers/norm/rms_norm_row.cuh"

namespace specdec::layers {
namespace {

template <class T, int N, int kPacksPerThread>
__global__ void __launch_bounds__(kMaxRmsNormThreads, kRmsNormBlocksPerSm<kPacksPerThread>)
    rms_norm_concat_kernel(RmsNormConcatParams p) {
  using P = Pack<T, N>;
  const int64_t row = blockIdx.x;
  const bool is_feature = blockIdx.y == 1;
  const void* const weight = is_feature ? p.feature_weight : p.embedding_weight;
  rms_norm_row<T, N, kPacksPerThread>(static_cast<const P*>(weight), static_cast<int>(p.width), p.eps, [&] {
    T* const out_row = static_cast<T*>(p.out) + row * p.out_stride;
    RmsNormRow<P> found{};
    if (is_feature) {
      const T* const features = static_cast<const T*>(p.features);
      found.x = reinterpret_cast<const P*>(features + feature_of(p, row) * p.features_stride);
      found.sum = reinterpret_cast<P*>(static_cast<T*>(p.out_features) + row * p.out_features_stride);
      found.out = reinterpret_cast<P*>(out_row + p.width);
    } else {
      const T* const embeddings = static_cast<const T*>(p.embeddings);
      found.x = reinterpret_cast<const P*>(embeddings + embedding_of(p, row) * p.embeddings_stride);
      found.out = reinterpret_cast<P*>(out_row);
    }
    return found;
  });
}

}  // namespace

void rms_norm_concat_cuda(const RmsNormConcatParams& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() {
    with_rms_norm_shape<T>("rms_norm_concat", 2 * p.rows, p.width, p.vectorized,
                           [&]<int N, int kPacksPerThread>(unsigned threads) {
                             const dim3 grid(grid_x("rms_norm_concat", p.rows), 2);
                             launch("rms_norm_concat", rms_norm_concat_kernel<T, N, kPacksPerThread>,
                                    {.grid = grid, .threads = threads}, stream, p);
                           });
  });
}

}  // namespace specdec::layers
