// move_accept_tokens: argument checks and the CPU implementation.
#include "compat/move_accept_tokens.h"

#include <cstring>
#include <limits>

namespace specdec::compat {

void move_accept_tokens(CallStream stream, const TensorView& data_ptrs, int64_t row_bytes, int64_t num_rows,
                        const TensorView& req_to_token, const TensorView& req_pool_indices, const TensorView& seq_lens,
                        const TensorView& out_cache_loc, const TensorView& accept_index,
                        const TensorView& num_correct_drafts) {
  Check check("move_accept_tokens");
  Dim buffers{"buffers"}, slots{"num_slots"}, places{"places"}, B{"batch"}, locs{"num_locs"}, S{"width"};
  check.tensor("data_ptrs", data_ptrs, {buffers}, kInt64);
  check.range("row_bytes", row_bytes, 0, 1 << 24);
  check.that(row_bytes % kCopyBytes == 0, "row_bytes", {"is ", row_bytes}, {"a multiple of ", kCopyBytes});
  check.range("buffers * row_bytes", buffers * row_bytes, 0, std::numeric_limits<int32_t>::max());
  check.range("num_rows", num_rows, 0, std::numeric_limits<int32_t>::max());
  check.tensor("req_to_token", req_to_token, {slots, places}, kInt32);
  check.tensor("req_pool_indices", req_pool_indices, {B}, kInt64);
  check.tensor("seq_lens", seq_lens, {B}, kInt64);
  check.tensor("out_cache_loc", out_cache_loc, {locs}, kInt64);
  check.tensor("accept_index", accept_index, {B, S}, kInt32);
  check.tensor("num_correct_drafts", num_correct_drafts, {B}, kInt32);
  if (B == 0 || S == 0 || buffers * row_bytes == 0) return;
  const MoveAcceptTokensParams params{
      .buffers = reinterpret_cast<char* const*>(data_ptrs.data<const int64_t>()),
      .req_to_token = req_to_token.data<const int32_t>(),
      .req_pool_indices = req_pool_indices.data<const int64_t>(),
      .seq_lens = seq_lens.data<const int64_t>(),
      .out_cache_loc = out_cache_loc.data<const int64_t>(),
      .accept_index = accept_index.data<const int32_t>(),
      .num_correct = num_correct_drafts.data<const int32_t>(),
      .num_buffers = buffers,
      .row_bytes = row_bytes,
      .num_rows = num_rows,
      .num_slots = slots,
      .places = places,
      .num_locs = locs,
      .batch = B,
      .width = S,
  };
  SD_DISPATCH(check, stream, move_accept_tokens, params);
}

void move_accept_tokens_cpu(const MoveAcceptTokensParams& p) {
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t j = 0; j < path_length(p, b); ++j) {
      const TokenMove move = find_token_move(p, b, j);
      for (int64_t buffer = 0; move.needed && buffer < p.num_buffers; ++buffer)
        std::memcpy(p.buffers[buffer] + move.to, p.buffers[buffer] + move.from, p.row_bytes);
    }
}

}  // namespace specdec::compat
