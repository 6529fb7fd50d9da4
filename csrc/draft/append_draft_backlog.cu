// append_draft_backlog on a GPU: one block per request, which alone knows the length of its slot's backlog.
//
// A round without drafting appends one row: 24 KiB for an EAGLE-3 head on a model with hidden size 4096, i.e. three
// 16-byte loads per thread, all issued before the first store.
#include "core/bytes.h"
#include "core/cuda.cuh"
#include "draft/append_draft_backlog.h"

namespace specdec::draft {
namespace {

constexpr int kThreads = 512, kUnits = 4;  // in flight per thread

template <class Unit>
__global__ void __launch_bounds__(kThreads) append_draft_backlog_kernel(AppendDraftBacklogParams p) {
  begin_kernel();
  const BacklogRows r = backlog_rows(p, blockIdx.x);
  const int64_t units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t j = r.first; j < r.end; ++j) {
    if (threadIdx.x == 0) append_token(p, r, j);
    if (p.features == nullptr) continue;
    const auto* from = reinterpret_cast<const Unit*>(features_of(p, r, j));
    auto* to = reinterpret_cast<Unit*>(p.backlog_features + ring_row(p, r, j) * p.row_bytes);
    for (int64_t first = threadIdx.x; first < units; first += kUnits * kThreads) {
      Unit held[kUnits];
#pragma unroll
      for (int n = 0; n < kUnits; ++n)
        if (first + n * kThreads < units) held[n] = from[first + n * kThreads];
#pragma unroll
      for (int n = 0; n < kUnits; ++n)
        if (first + n * kThreads < units) to[first + n * kThreads] = held[n];
    }
  }
  __syncthreads();  // all threads have read the old length
  if (threadIdx.x == 0) advance_backlog(p, r);
}

}  // namespace

void append_draft_backlog_cuda(const AppendDraftBacklogParams& p, Stream stream) {
  with_copy_unit(p.unit, [&]<class Unit>() {
    launch("append_draft_backlog", append_draft_backlog_kernel<Unit>,
           {.grid = grid_x("append_draft_backlog", p.batch), .threads = kThreads}, stream, p);
  });
}

}  // namespace specdec::draft
