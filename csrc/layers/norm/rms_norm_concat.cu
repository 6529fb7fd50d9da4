// A block a row of embeddings, and one a row of features (norm_row.cuh). Reads both rows and the weights, and writes
// the pair and the feature once; of few rows what counts is one launch, and two reads in a row: the number and the row.
#include "layers/norm/rms_norm_concat.h"
#include "layers/norm/rms_norm_row.cuh"

namespace specdec::layers {
namespace {

template <class T, int N, int kHeld>
__global__ void __launch_bounds__(kMaxNormThreads, kNormBlocks<kHeld>) rms_norm_concat_kernel(RmsNormConcatParams p) {
  using P = Pack<T, N>;
  const int64_t row = blockIdx.x;
  const bool is_feature = blockIdx.y == 1;
  const void* const weight = is_feature ? p.feature_weight : p.embedding_weight;
  norm_row<T, N, kHeld>(static_cast<const P*>(weight), static_cast<int>(p.width), p.eps, [&] {
    T* const pair = static_cast<T*>(p.out) + row * p.out_stride;
    NormRow<P> found{};
    if (is_feature) {
      const T* const features = static_cast<const T*>(p.features);
      found.x = reinterpret_cast<const P*>(features + feature_of(p, row) * p.features_stride);
      found.sum = reinterpret_cast<P*>(static_cast<T*>(p.out_features) + row * p.out_features_stride);
      found.out = reinterpret_cast<P*>(pair + p.width);
    } else {
      const T* const embeddings = static_cast<const T*>(p.embeddings);
      found.x = reinterpret_cast<const P*>(embeddings + embedding_of(p, row) * p.embeddings_stride);
      found.out = reinterpret_cast<P*>(pair);
    }
    return found;
  });
}

}  // namespace

void rms_norm_concat_cuda(const RmsNormConcatParams& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() {
    with_norm_threads<T>("rms_norm_concat", 2 * p.rows, p.width, p.wide, [&]<int N, int kHeld>(unsigned threads) {
      const dim3 grid(grid_x("rms_norm_concat", p.rows), 2);
      launch("rms_norm_concat", rms_norm_concat_kernel<T, N, kHeld>, {.grid = grid, .threads = threads}, stream, p);
    });
  });
}

}  // namespace specdec::layers
