// commit_tokens on a GPU: one warp per request, one lane per token.
//
// Each warp reads and writes a few dozen bytes of tokens and slot state. The launch dominates; then two dependent
// loads: the slot index, then the slot's state.
#include "core/cuda.cuh"
#include "verify/commit_row.h"

namespace specdec::verify {
namespace {

constexpr int kWarps = 4;  // per block

// Return the index of the row's first stop token, or the row's width. cut_row decides whether it lies within the
// emitted tokens. `token` is this lane's token of the first 32.
__device__ int64_t first_stop(const CommitTokensParams& p, int64_t slot, const int32_t* tokens, int32_t token) {
  const int64_t lane = threadIdx.x % kWarp;
  for (int64_t first = 0; first < p.accept_width; first += kWarp) {
    if (first > 0) token = first + lane < p.accept_width ? tokens[first + lane] : -1;
    const unsigned stops = __ballot_sync(kFullMask, is_stop(p, slot, token));
    if (stops != 0) return first + __ffs(stops) - 1;
  }
  return p.accept_width;
}

__global__ void __launch_bounds__(kWarps* kWarp) commit_tokens_kernel(CommitTokensParams p) {
  begin_kernel();
  const int64_t b = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (b >= p.batch) return;
  int32_t* tokens = p.tokens + b * p.accept_width;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const int32_t len = p.num_valid[b],
                token = lane < p.accept_width ? tokens[lane] : -1;  // neither load waits for the slot

  SlotState state{};
  Cut cut;
  if (slot >= 0) {
    state = slot_state(p, slot);
    cut = cut_row(p, state, len, first_stop(p, slot, tokens, token));
  }
  __syncwarp();  // the writes below overwrite what every lane has read
  if (lane == 0) write_cut(p, b, slot, state, cut);
  for (int64_t j = lane; j < cut.kept; j += kWarp) count_token(p, slot, tokens[j]);
  for (int64_t j = cut.kept + lane; j < p.accept_width; j += kWarp) tokens[j] = -1;
}

}  // namespace

void commit_tokens_cuda(const CommitTokensParams& p, Stream stream) {
  const unsigned blocks = grid_x("commit_tokens", (p.batch + kWarps - 1) / kWarps);
  launch("commit_tokens", commit_tokens_kernel, {.grid = blocks, .threads = kWarps * kWarp}, stream, p);
}

}  // namespace specdec::verify
