// What the loop drives: the device side of the engine. Calls come from the thread that runs the loop, one at a time,
// and never while the scheduler holds its lock, so an executor may submit and cancel.
//
// Device state changes in the order of the calls, as one stream does it, and a call need not wait for the device. In
// the life of one slot: begin, prefill*, activate, launch*, deactivate. Any call may throw; scheduler.h says what
// happens then.
#pragma once

#include <cstdint>
#include <span>

namespace specdec::scheduler {

using Tokens = std::span<const int32_t>;

// Of the page table: slot * max_pages + index, and behind those of the slots the places of the prefix cache.
using Entries = std::span<const int32_t>;

// A request that gets a slot: what the executor and its draft are told of it.
struct Admitted {
  int64_t id;
  Tokens tokens;   // its prompt and, after a retraction, what it produced since
  int32_t group;   // who shares its text as n-gram drafts; 0: everybody
  void* extra;     // what the request brings along for the executor, which the scheduler does not look at; or null
  Entries cached;  // that hold its first pages, whose rows are written
};

// How far the device has come since the rings were made.
struct Progress {
  int64_t num_applied;    // command records
  int64_t num_published;  // rounds
};

// Rows start .. start + num_rows() - 1 of a text: their tokens, and the one that follows them. Nobody knows yet what
// follows a text's last token, the root: there it is the root once more.
struct Chunk {
  int32_t slot;
  int64_t start;
  Tokens tokens;
  int32_t next;
  int64_t num_rows() const { return std::ssize(tokens); }
};

// What a launch has for the rows of a round, where it is none that verifies nodes.
constexpr int64_t kCatchUp = 0;      // the draft of the slots catches up, and nothing is published
constexpr int64_t kFirstRound = -1;  // their first round, of the states that prefill has left of their roots

// A request of a round whose next tokens the executor rules on, and what it gained since the executor was last told.
struct Constrained {
  int64_t row;  // of the round
  int32_t slot;
  Tokens tokens;
};

class Executor {
 public:
  virtual ~Executor() = default;

  // The request gets the slot, which is empty, with the cached pages for its first ones. One that brings its rows along
  // has them written here.
  virtual void begin(int32_t slot, const Admitted& request) = 0;
  // Writes the rows of some slots' texts, in one pass if it can, and keeps the states of each chunk's last row: of a
  // text's last chunk those of the root, which the slot's first round goes on from.
  virtual void prefill(std::span<const Chunk> chunks) = 0;
  // The slots' state has been set by commands; their first round comes next: of those that were prefilled one of
  // kFirstRound, of those that brought their rows along one like all others.
  virtual void activate(std::span<const int32_t> slots) = 0;
  // Starts a round of `batch` slots that verifies `rows` nodes of theirs: applies the next command record, advances its
  // slots, publishes. No slot reads or writes KV from row `max_kv_len` on. With kFirstRound for the rows it verifies
  // the slots' roots alone, without a pass of the target. With kCatchUp it lets the draft of the record's slots catch
  // up behind that, and publishes nothing; and with a batch of 0 it applies the record and does no more.
  virtual void launch(int64_t batch, int64_t rows, int64_t max_kv_len) = 0;
  // The same in two steps, for rounds with constrained requests: as far as the target's logits, and, while the device
  // is at that, which tokens they allow, and the rest. `number` is that of the last command record, from 1 on.
  virtual void forward(int64_t batch, int64_t rows, int64_t max_kv_len) = 0;
  virtual void constrain(int64_t number, std::span<const Constrained> requests, int64_t batch, int64_t rows,
                         int64_t max_kv_len) = 0;
  // Their requests are finished, cancelled, failed or retracted, at any time after `begin` was called. The next command
  // record gives the slots and their pages back.
  virtual void deactivate(std::span<const int32_t> slots) = 0;

  // Entries of the page table get the pages of others, or none where a source is -1; all destinations differ, and none
  // is a source. A page that has no entry any more is free.
  virtual void assign_pages(Entries sources, Entries destinations) = 0;

  // Whether the device is still at work, so that it is worth waiting for. Throws where the device has failed.
  virtual bool busy() = 0;
  // Waits for the device. Asked after a launch that threw.
  virtual Progress progress() = 0;
};

}  // namespace specdec::scheduler
