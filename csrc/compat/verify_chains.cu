// One block a request, all of whose threads take the same steps. chain_speculative_sampling reads two probabilities a
// draft and one row of each side for the last token, 8 bytes x vocab (as much again for every prefix that block
// verification has to weigh). rejection_sample reads the logits of the drafts that it comes to, three times from L2:
// the largest, the sum, and where a draft is rejected the draw.
#include "compat/block_rows.cuh"
#include "compat/verify_chains.h"

namespace specdec::compat {
namespace {

__global__ void __launch_bounds__(BlockRows::kThreads) chain_kernel(ChainSamplingParams p) {
  begin_kernel();
  __shared__ BlockRows::Storage storage;
  BlockRows rows(storage);
  sample_chain(p, blockIdx.x, rows);
}

template <class T>
__global__ void __launch_bounds__(BlockRows::kThreads) rejection_kernel(RejectionSampleParams p) {
  begin_kernel();
  __shared__ BlockRows::Storage storage;
  BlockRows rows(storage);
  reject_drafts<T>(p, blockIdx.x, rows);
}

}  // namespace

void chain_speculative_sampling_cuda(const ChainSamplingParams& p, Stream stream) {
  const LaunchShape shape{.grid = grid_x("chain_speculative_sampling", p.links.batch), .threads = BlockRows::kThreads};
  launch("chain_speculative_sampling", chain_kernel, shape, stream, p);
}

void rejection_sample_cuda(const RejectionSampleParams& p, Stream stream) {
  const LaunchShape shape{.grid = grid_x("rejection_sample", p.batch), .threads = BlockRows::kThreads};
  with_float_type(p.logits_dtype,
                  [&]<class T>() { launch("rejection_sample", rejection_kernel<T>, shape, stream, p); });
}

}  // namespace specdec::compat
