// all_reduce, all_gather, all_reduce_add_rms_norm: exchange the rows of all ranks through memory that they share.
#pragma once

#include "parallel/exchange.h"

namespace specdec::parallel {

struct AllReduceParams {
  ExchangeParams exchange;
  void* out;  // [rows, width], or [rows, size * width] of all ranks' columns next to each other
};

struct AllReduceAddRmsNormParams {
  ExchangeParams exchange;
  const void* residual;                 // [rows, width] or null
  const void* weight;                   // [width]
  void* out_sum;                        // [rows, width]
  void* out;                            // [rows, width]
  int64_t residual_stride, sum_stride;  // between rows, in elements
  float eps;
};

void all_reduce(CallStream stream, const TensorView& x, const TensorView& buffers, const TensorView& state,
                int64_t rank, int64_t capacity, double timeout, const TensorView& out);
void all_gather(CallStream stream, const TensorView& x, const TensorView& buffers, const TensorView& state,
                int64_t rank, int64_t capacity, double timeout, const TensorView& out);
void all_reduce_add_rms_norm(CallStream stream, const TensorView& x, const TensorView& buffers, const TensorView& state,
                             int64_t rank, int64_t capacity, double timeout, const TensorView& weight, double eps,
                             const OptTensor& residual, const TensorView& out_sum, const TensorView& out);

void all_reduce_cpu(const AllReduceParams& p);
void all_reduce_cuda(const AllReduceParams& p, Stream stream);
void all_gather_cpu(const AllReduceParams& p);
void all_gather_cuda(const AllReduceParams& p, Stream stream);
void all_reduce_add_rms_norm_cpu(const AllReduceAddRmsNormParams& p);
void all_reduce_add_rms_norm_cuda(const AllReduceAddRmsNormParams& p, Stream stream);

}  // namespace specdec::parallel
