// edit_logits on a GPU: kParts blocks per request; each block handles vocabulary pieces of kPiece tokens for all of the
// request's nodes. The blocks of a slot without edits exit after two loads, so the launch is the cost.
//
// Each block reads a piece of bias and counts (8 bytes per token) once for all nodes and lists the few tokens that
// change; then each thread takes (listed token, node) pairs, whose loads are independent. Grammar masks are read whole
// (vocab / 8 bytes per node), and forbidden tokens are set to -inf.
#include "core/cuda.cuh"
#include "verify/edit_logits.h"

namespace specdec::verify {
namespace {

constexpr int kThreads = 256, kPiece = 2048, kParts = 32;

template <class T>
__global__ void __launch_bounds__(kThreads) edit_logits_kernel(EditLogitsParams p) {
  begin_kernel();
  const int64_t part = blockIdx.x % kParts, b = blockIdx.x / kParts;
  const EditedRequest r = edited_request(p, b);
  if (r.kinds == 0) return;
  __shared__ uint32_t is_drafted[kPiece / 32];
  __shared__ int32_t listed[kPiece];
  __shared__ int32_t count;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto nodes = static_cast<uint32_t>(r.nodes.count);

  for (int64_t first = part * kPiece; first < p.logits.vocab; first += int64_t{kParts} * kPiece) {
    const auto size = static_cast<int32_t>(p.logits.vocab - first < kPiece ? p.logits.vocab - first : kPiece);
    if (r.kinds & (kEditBias | kEditPenalties)) {
      if (thread < kPiece / 32) is_drafted[thread] = 0;
      if (thread == 0) count = 0;
      __syncthreads();
      for (int64_t i = 1 + thread; i < p.tree_nodes && (r.kinds & kEditPenalties); i += kThreads) {
        const int64_t v = p.tokens[b * p.tree_nodes + i] - first;
        if (v >= 0 && v < size) atomicOr(&is_drafted[v >> 5], 1u << (v & 31));
      }
      __syncthreads();
#pragma unroll 4
      for (int32_t v = thread; v < size; v += kThreads)
        if (is_edited(p, r, first + v) || is_drafted[v >> 5] >> (v & 31) & 1) listed[atomicAdd(&count, 1)] = v;
      __syncthreads();
      const uint32_t pairs = count * nodes;  // 64-bit division is slow
      for (uint32_t i = thread; i < pairs; i += kThreads) edit_logit<T>(p, r, i % nodes, first + listed[i / nodes]);
      __syncthreads();  // the list may be overwritten, and the mask is applied after the edits
    }
    if (r.kinds & kEditMask) {
      for (uint32_t node = 0; node < nodes; ++node) {
        T* row = p.logits.row<T>(r.b, r.nodes, node) + first;
        for (int32_t v = thread; v < size; v += kThreads)
          if (forbidden(p, r, node, (first + v) >> 5) >> (v & 31) & 1) row[v] = from_float<T>(-INFINITY);
      }
    }
  }
}

}  // namespace

void edit_logits_cuda(const EditLogitsParams& p, Stream stream) {
  with_float_type(p.logits.dtype, [&]<class T>() {
    launch("edit_logits", edit_logits_kernel<T>,
           {.grid = grid_x("edit_logits", p.logits.batch * kParts), .threads = kThreads}, stream, p);
  });
}

}  // namespace specdec::verify
