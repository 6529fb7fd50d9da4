// move_accept_tokens: compact the KV rows of SGLang's accepted paths, in every layer of its pool.
#pragma once

#include "core/dispatch.h"
#include "core/host_device.h"

namespace specdec::compat {

constexpr int64_t kCopyBytes = 16;  // per access

struct MoveAcceptTokensParams {
  char* const* buffers;         // [num_buffers]: K and V of each layer, num_rows rows of row_bytes
  const int32_t* req_to_token;  // [num_slots, places]
  const int64_t* req_pool_indices;
  const int64_t* seq_lens;       // [batch], as the slots above
  const int64_t* out_cache_loc;  // [num_locs], by flat row of the trees
  const int32_t* accept_index;   // [batch, width], flat rows
  const int32_t* num_correct;    // [batch], without the root
  int64_t num_buffers, row_bytes, num_rows;
  int64_t num_slots, places, num_locs, batch, width;
};

void move_accept_tokens(CallStream stream, const TensorView& data_ptrs, int64_t row_bytes, int64_t num_rows,
                        const TensorView& req_to_token, const TensorView& req_pool_indices, const TensorView& seq_lens,
                        const TensorView& out_cache_loc, const TensorView& accept_index,
                        const TensorView& num_correct_drafts);

void move_accept_tokens_cpu(const MoveAcceptTokensParams& p);
void move_accept_tokens_cuda(const MoveAcceptTokensParams& p, Stream stream);

// Return the number of path entries of request b, the root included.
SD_HD int64_t path_length(const MoveAcceptTokensParams& p, int64_t b) {
  const int64_t count = int64_t{p.num_correct[b]} + 1;
  return count < p.width ? count : p.width;
}

// Byte offsets from the first row of any buffer.
struct TokenMove {
  int64_t from, to;
  bool needed = false;
};

// Find the row of path entry j and its destination, position seq_len + j of the request. Path rows increase, so they
// lie after their destinations: moved in order, none is overwritten before it has moved.
SD_HD TokenMove find_token_move(const MoveAcceptTokensParams& p, int64_t b, int64_t j) {
  const int64_t at = p.accept_index[b * p.width + j], slot = p.req_pool_indices[b], len = p.seq_lens[b];
  if (at < 0 || at >= p.num_locs || slot < 0 || slot >= p.num_slots || len < 0 || len >= p.places - j) return {};
  const int64_t from = p.out_cache_loc[at], to = p.req_to_token[slot * p.places + len + j];
  if (from == to || from < 0 || from >= p.num_rows || to < 0 || to >= p.num_rows) return {};
  return {.from = from * p.row_bytes, .to = to * p.row_bytes, .needed = true};
}

}  // namespace specdec::compat
