// small_m_bmm: batched GEMM for small M, out[:, h] = x[:, h] weight[h] for every head h, bound by the bandwidth that
// reads the weights. The absorbed form of latent attention multiplies queries and outputs by it.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec::layers {

constexpr int64_t kMaxSmallMBmmRows = 1 << 18, kMaxSmallMBmmHeads = kMaxGridY;
constexpr int64_t kMaxSmallMBmmIns = 1024;  // a block holds its columns of a weight whole

struct SmallMBmmParams {
  const void* x;       // [rows, heads, ins]
  const void* weight;  // [heads, ins, outs]
  void* out;           // [rows, heads, outs]
  int64_t rows, heads, ins, outs;
  int64_t x_strides[2], out_strides[2];  // of a row and of a head, in elements
  int64_t weight_strides[3];             // one of the last two is 1
  Dtypes dtype;
};

void small_m_bmm(CallStream stream, const TensorView& x, const TensorView& weight, const TensorView& out);

void small_m_bmm_cpu(const SmallMBmmParams& p);
void small_m_bmm_cuda(const SmallMBmmParams& p, Stream stream);

}  // namespace specdec::layers
