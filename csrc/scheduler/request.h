// A request and its life: queued -> prefilling -> starting -> beginning -> running -> finished, and back to queued when
// it is retracted. Starting: the device knows its length and root. Beginning: its draft knows it, too, and its first
// round is about to come, from what prefill has left; one that has brought its rows along begins with any round.
#pragma once

#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "core/finish_reason.h"
#include "scheduler/prefix_cache.h"

namespace specdec::scheduler {

enum class RequestState { kQueued, kPrefilling, kStarting, kBeginning, kRunning, kFinished };

// Totals of a request since it was submitted, over the rounds that gave it tokens, first rounds left out: nothing was
// drafted for them.
struct RoundCounts {
  int64_t rounds = 0;
  int64_t drafted = 0;   // tree nodes without the root
  int64_t accepted = 0;  // tokens without the bonus
  int64_t cached = 0;    // rows of its prompt that were in the prefix cache when it began
};

// How a request samples: slot state, as verify_tree takes it.
struct Sampling {
  float temperature = 0;
  int32_t top_k = 0;
  float top_p = 1, min_p = 0;
  int64_t seed = 0;
};

// Log-probabilities that results hold beside tokens where the request asked for them: that of each token, and those of
// the best entries of the logits it was chosen from.
struct Scores {
  std::vector<float> logprobs;
  std::vector<int32_t> top_ids;     // num_logprobs a token, best first
  std::vector<float> top_logprobs;  // likewise
};

constexpr int64_t kNoDeadline = std::numeric_limits<int64_t>::max();

// The members that every round reads or writes stand first, in two cache lines. A loop that has waited for a round
// finds its caches cold, and then fetching each line of each request costs more than the work on it.
struct alignas(64) Request {
  int64_t id;
  std::vector<int32_t> text;  // the prompt and every token read so far; the last one is the root
  int64_t emitted;            // how much of `text` has been emitted, the prompt included
  int64_t remaining;          // how many tokens it may still produce
  int64_t in_flight = 0;      // rounds it takes part in that are launched and not yet read
  uint64_t last_round = 0;    // number of the last round it took part in
  int64_t sound = 0;          // rows of its slot that a round has been read of, which found nothing wrong
  RoundCounts counts = {};
  RequestState state = RequestState::kQueued;
  int32_t slot = -1;
  int32_t num_shared = 0;  // first pages of its slot that are the prefix cache's
  // How many of the best entries of its logits each token's log-probability is wanted with; -1: not even its own.
  int32_t num_logprobs = -1;
  int32_t max_nodes;         // of its tree in any round, the root included
  int32_t behind = 0;        // rounds that its draft has rested since it last caught up, or more than those
  bool constrained = false;  // the executor rules on its next tokens
  bool streams;              // emits after every round, not only at its end
  bool written = false;      // it brings the rows of its text along, which the executor's `begin` writes

  int32_t stops_from = 0;  // first position where a stop token may stand; 0: anywhere
  int64_t told = 0;        // how much of `text` the executor knows, where it rules on it
  int64_t prefilled = 0;   // rows of text whose KV is written, while prefilling; the root's is the last of them
  std::vector<int32_t> stop_tokens;
  Sampling sampling = {};
  int32_t ngram_group = 0;
  int32_t priority = 0;
  int64_t deadline = kNoDeadline;       // of round::nanoseconds
  std::shared_ptr<void> extra = {};     // as in Admitted
  PrefixCache::Node* prefix = nullptr;  // the shared pages, locked; null: none
  std::unique_ptr<Scores> scores = {};  // of the tokens not yet emitted, where they were asked for

  // Who comes first: in the queue, in prefill, and at keeping a slot. Lower numbers do.
  std::pair<int32_t, int64_t> rank() const { return {priority, id}; }
  int64_t seq_len() const { return static_cast<int64_t>(text.size()) - 1; }
  bool running() const { return state == RequestState::kRunning; }
  bool wants_drafts() const { return max_nodes > 1; }
  int64_t rows_to_prefill() const { return state == RequestState::kPrefilling ? std::ssize(text) - prefilled : 0; }

  // Whether the request may still need tokens after the rounds in flight. Each of them gives it one token or more,
  // unless it stalls, which is seen when the round is read.
  bool wants_another_round(int64_t max_len) const {
    return running() && in_flight < remaining && static_cast<int64_t>(text.size()) + in_flight < max_len;
  }

  void take_slot(int32_t new_slot) {
    state = RequestState::kPrefilling;
    slot = new_slot;
    sound = 0;
    in_flight = 0;
    behind = 0;
  }
  // Nothing is lost: `text` holds what was produced, and is prefilled again as a prompt would be.
  void leave_slot(RequestState next) {
    state = next;
    slot = -1;
    written = false;
  }
  void accept(const int32_t* tokens, int64_t count) {
    text.insert(text.end(), tokens, tokens + count);
    remaining -= count;
  }
  void count_round(int64_t count, int64_t num_nodes) {
    counts.rounds += 1;
    counts.drafted += num_nodes - 1;
    counts.accepted += count - 1;
  }
  // Appends what has not been emitted yet, and returns how much that is.
  int64_t take_tokens(std::vector<int32_t>& tokens) {
    const auto begin = text.begin() + std::exchange(emitted, static_cast<int64_t>(text.size()));
    tokens.insert(tokens.end(), begin, text.end());
    return text.end() - begin;
  }
  std::unique_ptr<const Scores> take_scores() {
    return num_logprobs < 0 ? nullptr : std::exchange(scores, std::make_unique<Scores>());
  }
};

}  // namespace specdec::scheduler
