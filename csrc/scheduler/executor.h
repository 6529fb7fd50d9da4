// The device side of the engine, as the loop drives it. Calls come from the thread that runs the loop, one at a time,
// and never while the scheduler holds its lock, so an executor may submit and cancel.
//
// Device state changes in the order of the calls, as on one stream, and a call need not wait for the device. The life
// of a slot is: begin, prefill*, activate, launch*, deactivate. Any call may throw; scheduler.h says what happens then.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace specdec::scheduler {

using Tokens = std::span<const int32_t>;

// Indices of page table entries: slot * max_pages + page, then the places of the prefix cache after those of all slots.
using Entries = std::span<const int32_t>;

// A request that gets a slot.
struct AdmittedRequest {
  int64_t id;
  Tokens tokens;           // its prompt and, after a retraction, the tokens it produced since
  int32_t ngram_group;     // requests of a group share their texts as n-gram drafts; 0: all do
  void* extra;             // opaque to the scheduler: passed from the submission to the executor; or null
  Entries cached_entries;  // entries of its first pages, whose rows the prefix cache has
  int32_t snapshot = -1;   // of the recurrent states after those rows; -1: there are no such rows or states
};

// Records that the device has processed since the rings were created.
struct Progress {
  int64_t num_applied;    // command records
  int64_t num_published;  // rounds
};

// Rows start .. start + num_rows() - 1 of a text: their tokens, and the token after them. After a text's last token
// (the root) that token is unknown: the root is repeated.
struct Chunk {
  int32_t slot;
  int64_t start;
  Tokens tokens;
  int32_t next;
  int64_t num_rows() const { return std::ssize(tokens); }
};

// Values of `rows` of a launch that verifies no nodes.
constexpr int64_t kCatchUp = 0;  // the draft of the slots catches up, and nothing is published
constexpr int64_t kFirstRound =
    -1;  // the slots' first round, from the hidden states of their roots that prefill has kept

// A request of a round whose next tokens the executor constrains, and its tokens since the last such call.
struct Constrained {
  int64_t row;  // of the round
  int32_t slot;
  Tokens tokens;
};

class Executor {
 public:
  virtual ~Executor() = default;

  // Gives the request an empty slot, with the cached pages as its first ones and the snapshot as its state. Writes the
  // KV rows of a migrated request.
  virtual void begin(int32_t slot, const AdmittedRequest& request) = 0;
  // Writes the KV rows of chunks of some slots' texts, in one pass if possible, and keeps the hidden states of each
  // chunk's last row: for a text's last chunk those of the root, from which the slot's first round starts.
  virtual void prefill(std::span<const Chunk> chunks) = 0;
  // Copies the recurrent states of slots, which are being prefilled, after their last chunks to snapshots.
  virtual void save_snapshots(std::span<const int32_t> slots, std::span<const int32_t> snapshots) = 0;
  // Prepares slots, whose state commands have set, for rounds: prefilled slots start with kFirstRound; migrated slots
  // start with a normal round.
  virtual void activate(std::span<const int32_t> slots) = 0;
  // Starts a round of `batch` slots that verifies `rows` nodes in all: applies the next command record, advances its
  // slots, publishes. No slot reads or writes KV from row `max_kv_len` on. With kFirstRound it verifies the slots'
  // roots alone, without a forward pass of the target. With kCatchUp it applies the record, lets the draft of its slots
  // catch up, and publishes nothing. With a batch of 0 it only applies the record.
  virtual void launch(int64_t batch, int64_t rows, int64_t max_kv_len) = 0;
  // Does the same in two steps, for rounds with constrained requests: `forward` as far as the target's logits;
  // `constrain`, while the device works on these, finds the allowed tokens and launches the rest. `number` is that of
  // the last command record, from 1 on.
  virtual void forward(int64_t batch, int64_t rows, int64_t max_kv_len) = 0;
  virtual void constrain(int64_t number, std::span<const Constrained> requests, int64_t batch, int64_t rows,
                         int64_t max_kv_len) = 0;
  // Releases slots whose requests are finished, cancelled, failed or retracted, at any time after `begin`. The next
  // command record gives the slots and their pages back.
  virtual void deactivate(std::span<const int32_t> slots) = 0;

  // Gives page table entries the pages of other entries, or none if a source is -1. All destinations differ, and none
  // is a source. A page without an entry is free.
  virtual void assign_pages(Entries sources, Entries destinations) = 0;

  // Returns whether the device is still working, so that waiting for it makes sense. Throws if the device has failed.
  virtual bool busy() = 0;
  // Waits for the device. Called after a launch that threw.
  virtual Progress progress() = 0;

  // Throws once another rank of a divided model has failed. The device counts as gone then.
  virtual void expect_alive() {}
  // Waits until all other ranks have finished round `number`, of `batch` rows, which this one has, and throws unless
  // they have the same results; `name_of_row` names a row in the message. Returns the longest duration of the round on
  // another rank in ns; 0 if there are no others.
  virtual int64_t agree(int64_t /*number*/, int64_t /*batch*/,
                        const std::function<std::string(int64_t)>& /*name_of_row*/) {
    return 0;
  }
};

}  // namespace specdec::scheduler
