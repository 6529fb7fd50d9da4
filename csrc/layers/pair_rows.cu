// A block a row of embeddings, and one a row of features (norm_row.cuh). Reads both rows and the weights, and writes
// the pair and the feature once; of few rows what counts is one launch, and two reads in a row: the number and the row.
#include "layers/norm_row.cuh"
#include "layers/pair_rows.h"

namespace specdec::layers {
namespace {

template <class T, int N, int kHeld>
__global__ void __launch_bounds__(kMaxNormThreads, kNormBlocks<kHeld>) pair_rows_kernel(PairRowsParams p) {
  using P = Pack<T, N>;
  begin_kernel();
  const int64_t row = blockIdx.x;
  T* const pair = static_cast<T*>(p.out) + row * p.out_stride;
  NormRow<P> of_block{};
  if (blockIdx.y == 0) {
    const T* const embeddings = static_cast<const T*>(p.embeddings);
    of_block.x = reinterpret_cast<const P*>(embeddings + embedding_of(p, row) * p.embeddings_stride);
    of_block.weight = static_cast<const P*>(p.embedding_weight);
    of_block.out = reinterpret_cast<P*>(pair);
  } else {
    const T* const features = static_cast<const T*>(p.features);
    of_block.x = reinterpret_cast<const P*>(features + feature_of(p, row) * p.features_stride);
    of_block.weight = static_cast<const P*>(p.feature_weight);
    of_block.sum = reinterpret_cast<P*>(static_cast<T*>(p.out_features) + row * p.out_features_stride);
    of_block.out = reinterpret_cast<P*>(pair + p.width);
  }
  norm_row<T, N, kHeld>(of_block, static_cast<int>(p.width), p.eps);
}

}  // namespace

void pair_rows_cuda(const PairRowsParams& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() {
    with_norm_threads<T>("pair_rows", 2 * p.rows, p.width, p.wide, [&]<int N, int kHeld>(unsigned threads) {
      const dim3 grid(grid_x("pair_rows", p.rows), 2);
      launch("pair_rows", pair_rows_kernel<T, N, kHeld>, {.grid = grid, .threads = threads}, stream, p);
    });
  });
}

}  // namespace specdec::layers
