// What the loop drives: the device side of the engine. Calls come from the thread that runs the loop, one at a time,
// and never while the scheduler holds its lock, so an executor may submit and cancel.
//
// In the life of one slot: begin, prefill*, activate, round*, deactivate. Any call may throw; scheduler.h says what
// happens then.
#pragma once

#include <cstdint>
#include <span>

#include "scheduler/request.h"

namespace specdec::scheduler {

using Tokens = std::span<const int32_t>;

// Some new tokens of one request, possibly none; the last emission of a request is the one with a finish reason.
struct Emission {
  int64_t request_id;
  std::vector<int32_t> tokens;
  FinishReason reason = FinishReason::kNone;
  RoundCounts counts;
  int32_t status = 0;  // StatusBits, where the reason is kError; 0 where an executor call threw
};

class Executor {
 public:
  virtual ~Executor() = default;

  // The request gets the slot. `text` is its prompt and, after a retraction, what it produced since.
  virtual void begin(int32_t slot, int64_t request_id, Tokens text) = 0;
  // Writes rows start .. start + tokens.size() - 1 of text[:-1]. Not called for a text of one token.
  virtual void prefill(int32_t slot, Tokens tokens, int64_t start, bool is_last) = 0;
  // The slot's state before its first round. The root is the last token of the text.
  virtual void activate(int32_t slot, int64_t request_id, int64_t seq_len, int32_t root, int64_t remaining,
                        Tokens stop_tokens) = 0;
  // One round over these running slots. Row i of the results is slots[i].
  virtual void round(std::span<const int32_t> slots) = 0;
  // Finished, cancelled, failed or retracted, at any time after `begin` was called: its pages go back, it is free.
  virtual void deactivate(int32_t slot, int64_t request_id) = 0;
  virtual void emit(const Emission& emission) = 0;
};

// Where a round leaves its results, on the host: row i belongs to slots[i].
struct RoundResults {
  const int32_t* out_tokens;      // [max_batch, accept_width]
  const int32_t* out_len;         // [max_batch] 0 (stalled) to accept_width
  const int32_t* finish_reasons;  // [max_batch] FinishReason, kNone to kContext
  const int32_t* status;          // [max_batch] StatusBits
  const int32_t* num_nodes;       // [max_batch] of the tree, with its root
};

}  // namespace specdec::scheduler
