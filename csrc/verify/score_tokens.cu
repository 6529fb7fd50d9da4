// score_tokens on a GPU: one block per token, or a cluster of up to 8 blocks if there are few tokens, as in select_topk
// (core/row_topk.cuh).
//
// Reads the logits of the nodes that emitted a token, once, and no others. The blocks of a token that needs no score
// exit after two loads.
#include "core/row_topk.cuh"
#include "verify/score_tokens.h"

namespace specdec::verify {
namespace {

static_assert(kMaxTopAlternatives <= kMaxRowTopk);

template <class T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocksPerSm)
    score_tokens_kernel(ScoreTokensParams p, int log2_blocks) {
  begin_kernel();
  __shared__ RowTopkStorage storage;
  const int64_t r = blockIdx.x >> log2_blocks;
  const bool first_block = (blockIdx.x & ((1 << log2_blocks) - 1)) == 0;
  const int thread = static_cast<int>(threadIdx.x);
  int32_t* top_ids = p.out_top_ids + r * p.top_n;
  float* top_logprobs = p.out_top_logprobs + r * p.top_n;

  const auto width = static_cast<uint32_t>(p.width), number = static_cast<uint32_t>(r);  // 64-bit division is slow
  const int wanted = static_cast<int>(wanted_top_n(p, number / width));
  int64_t start = logits_of_token(p, number / width, number % width);  // these loads do not wait for those above
  if (wanted < 0) start = -1;
  const int top_n = start < 0 ? 0 : wanted;
  if (first_block && thread >= top_n && thread < p.top_n) {
    top_ids[thread] = -1;
    top_logprobs[thread] = -INFINITY;
  }
  if (start < 0) {
    if (first_block && thread == 0) p.out_logprobs[r] = -INFINITY;
    return;
  }
  const T* row = static_cast<const T*>(p.logits) + start;
  const float x_of_token = to_float(row[p.tokens[r]]);
  const Softmax softmax = row_topk(storage, row, p.vocab, max(top_n, 1), log2_blocks,
                                   [&](int place, int32_t id, float x, const Softmax& all) {
                                     if (place >= top_n) return;
                                     top_ids[place] = id;
                                     top_logprobs[place] = all.logprob(x, kLog2e);
                                   });
  if (first_block && thread == 0) p.out_logprobs[r] = softmax.logprob(x_of_token, kLog2e);
}

}  // namespace

void score_tokens_cuda(const ScoreTokensParams& p, Stream stream) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    const int64_t rows = p.batch * p.width;
    // About half of the entries of padded rows hold a token.
    const int log2_blocks = row_log2_blocks<T>("score_tokens", (rows + 1) / 2, p.vocab);
    launch("score_tokens", score_tokens_kernel<T>, row_shape("score_tokens", rows, log2_blocks), stream, p,
           log2_blocks);
  });
}

}  // namespace specdec::verify
