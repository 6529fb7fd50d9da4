// One block a row, or a cluster of up to 8 where rows are few; the row is read once (row_topk.cuh), so 2 or 4 bytes an
// entry are all that counts for many rows, and a read, two block barriers and a cluster barrier for few.
#include "core/row_topk.cuh"
#include "draft/select_topk.h"

namespace specdec {
namespace {

static_assert(kMaxTopk <= kMaxRowTopk);

template <class T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocksPerProcessor)
    select_topk_kernel(SelectTopkParams p, int log2_blocks) {
  begin_kernel();
  __shared__ RowTopkStorage storage;
  const int64_t r = blockIdx.x >> log2_blocks;
  const T* row = static_cast<const T*>(p.logits) + r * p.logits_stride;
  row_topk(storage, row, p.vocab, static_cast<int>(p.k), log2_blocks,
           [&](int place, int32_t id, float x, const Softmax& softmax) {
             p.out_ids[r * p.k + place] = p.id_map ? p.id_map[id] : id;
             p.out_logprobs[r * p.k + place] = softmax.logprob(x, kLog2e);
           });
}

}  // namespace

void select_topk_cuda(const SelectTopkParams& p, Stream stream) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    const int log2_blocks = row_log2_blocks<T>("select_topk", p.rows, p.vocab);
    launch("select_topk", select_topk_kernel<T>, row_shape("select_topk", p.rows, log2_blocks), stream, p, log2_blocks);
  });
}

}  // namespace specdec
