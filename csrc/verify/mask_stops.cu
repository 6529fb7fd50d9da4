// mask_stops on a GPU: one block per request, one thread per (node, stop token) pair. Blocks of slots without a minimum
// length exit after two loads.
#include "core/cuda.cuh"
#include "verify/mask_stops.h"

namespace specdec::verify {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads) mask_stops_kernel(MaskStopsParams p) {
  begin_kernel();
  const int64_t b = blockIdx.x, slot = slot_with_minimum(p, b);
  if (slot < 0) return;
  const RowRange nodes = p.logits.nodes(b);
  const auto stops = static_cast<uint32_t>(p.max_stops), count = static_cast<uint32_t>(nodes.count) * stops;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) mask_stop<T>(p, b, slot, nodes, i / stops, i % stops);
}

}  // namespace

void mask_stops_cuda(const MaskStopsParams& p, Stream stream) {
  with_float_type(p.logits.dtype, [&]<class T>() {
    launch("mask_stops", mask_stops_kernel<T>, {.grid = grid_x("mask_stops", p.logits.batch), .threads = kThreads},
           stream, p);
  });
}

}  // namespace specdec::verify
