// What the loop drives: the device side of the engine. Calls come from the thread that runs the loop, one at a time,
// and never while the scheduler holds its lock, so an executor may submit and cancel.
//
// Device state changes in the order of the calls, as one stream does it, and a call need not wait for the device. In
// the life of one slot: begin, prefill*, activate, launch*, deactivate. Any call may throw; scheduler.h says what
// happens then.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "scheduler/request.h"

namespace specdec::scheduler {

using Tokens = std::span<const int32_t>;

// Some new tokens of one request, possibly none; the last emission of a request is the one with a finish reason.
struct Emission {
  int64_t request_id, num_tokens;
  FinishReason reason = FinishReason::kNone;
  int32_t status = 0;  // StatusBits, where the reason is kError; 0 where an executor call threw
  RoundCounts counts;
  std::unique_ptr<const Scores> scores;  // of the tokens; null where they were not asked for
};

// What a turn has to report. The tokens stand together: a round of many requests is copied once, and allocates nothing.
struct Emissions {
  std::vector<Emission> each;
  std::vector<int32_t> tokens;  // of each, one after another

  void clear() {
    each.clear();
    tokens.clear();
  }
};

// How far the device has come since the rings were made.
struct Progress {
  int64_t num_applied;    // command records
  int64_t num_published;  // rounds
};

// Rows start .. start + num_rows() - 1 of a text but its last token: their tokens, and the one that follows them.
struct Chunk {
  int32_t slot;
  int64_t start;
  Tokens tokens;
  int64_t num_rows() const { return std::ssize(tokens) - 1; }
};

class Executor {
 public:
  virtual ~Executor() = default;

  // The request gets the slot, which is empty. `text` is its prompt and, after a retraction, what it produced since.
  virtual void begin(int32_t slot, int64_t request_id, Tokens text) = 0;
  // Writes the rows of some slots' texts, in one pass if it can. Not called for a text of one token.
  virtual void prefill(std::span<const Chunk> chunks) = 0;
  // The slots' state has been set by commands; their first round comes next.
  virtual void activate(std::span<const int32_t> slots) = 0;
  // Starts a round of `batch` rows with trees of `num_nodes`: applies the next command record, advances its slots,
  // publishes. With a batch of 0, applies the record and does no more.
  virtual void launch(int64_t batch, int64_t num_nodes) = 0;
  // Their requests are finished, cancelled, failed or retracted, at any time after `begin` was called. The next command
  // record gives the slots and their pages back.
  virtual void deactivate(std::span<const int32_t> slots) = 0;
  virtual void emit(const Emissions& emissions) = 0;

  // Whether the device is still at work, so that it is worth waiting for. Throws where the device has failed.
  virtual bool busy() = 0;
  // Waits for the device. Asked after a launch that threw.
  virtual Progress progress() = 0;
};

}  // namespace specdec::scheduler
