// moe_grouped_gemm: grouped GEMM of MoE experts for small batches. Multiplies each row by the weights of its top-k
// experts; each selected expert's weight is read once per few rows. Experts that all rows share may follow the routed
// ones: equal parts of one MLP, whose weights stay as that MLP stores them.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec::layers {

constexpr int64_t kMaxExperts = 1024;

// An expert's weight of elements W: where it begins, elements from one row to the next, and rows from a gate row to its
// up row.
template <class W>
struct ExpertWeight {
  const W* data;
  int64_t stride, up_distance;
};

struct MoeGroupedGemmParams {
  const void* x;       // [rows, in]
  const void* weight;  // [experts, out, in]; gated: [experts, 2 * out, in], gate rows first, then up rows
  // Null, or a 16-bit weight of num_shared more experts. Gated, they divide the outputs: [2 * num_shared * out, in],
  // gate rows of all, then up rows. Else they divide the inputs: [out, num_shared * in].
  const void* shared_weight;
  const int64_t* sorted_pairs;  // [pairs], (row, expert) pairs sorted by expert; pair i belongs to row i * rows / pairs
  const int32_t* expert_ends;   // [all_experts()], end of each expert's range in sorted_pairs
  // Each may be null. x_scales: [groups, rows] of FP8 x. weight_scales: [experts, groups, out or 2 * out] of an FP8
  // weight. A group is a whole row or 128 elements.
  const float *x_scales, *weight_scales;
  void* out;  // [pairs, out]
  int64_t rows, pairs, experts, num_shared, in, outs, groups;
  // Between rows, in elements; x_scales_stride between groups.
  int64_t x_stride, x_scales_stride, shared_stride, out_stride;
  Dtypes dtype;  // of out, and of x and weight unless they have scales
  bool gated;    // out is silu(gate) * up; outs is a multiple of 8
  // A call with these sorted_pairs and expert_ends was launched on the stream after they were written.
  bool routing_ready;

  SD_HD int64_t weight_rows() const { return gated ? 2 * outs : outs; }
  SD_HD int64_t all_experts() const { return experts + num_shared; }
  // Return an expert's weight, in elements of W.
  template <class W>
  SD_HD ExpertWeight<W> weight_of(int64_t expert) const {
    if (expert < experts) return {static_cast<const W*>(weight) + expert * weight_rows() * in, in, outs};
    const int64_t begin = (expert - experts) * (gated ? outs * shared_stride : in);
    return {static_cast<const W*>(shared_weight) + begin, shared_stride, num_shared * outs};
  }
  // Return where an expert's pairs begin (expert may be all_experts()), clamped to sorted_pairs whatever the data says.
  SD_HD int64_t begin(int64_t expert) const {
    const int64_t end = expert > 0 ? expert_ends[expert - 1] : 0;
    return end < 0 ? 0 : end < pairs ? end : pairs;
  }
  SD_HD int64_t pair(int64_t place) const {
    const int64_t pair = sorted_pairs[place];
    return pair < 0 ? 0 : pair < pairs ? pair : pairs - 1;
  }
};

void moe_grouped_gemm(CallStream stream, const TensorView& x, const TensorView& weight, const TensorView& sorted_pairs,
                      const TensorView& expert_ends, const OptTensor& x_scales, const OptTensor& weight_scales,
                      const OptTensor& shared_weight, bool gated, bool routing_ready, const TensorView& out);

void moe_grouped_gemm_cpu(const MoeGroupedGemmParams& p);
void moe_grouped_gemm_cuda(const MoeGroupedGemmParams& p, Stream stream);

}  // namespace specdec::layers
