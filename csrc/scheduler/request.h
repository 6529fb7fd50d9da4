// A request and its life: queued -> prefilling -> starting -> beginning -> running -> finished, and back to queued if
// it is retracted. Starting: the device has its length and root. Beginning: its draft has it, too, and its first round
// comes next, from the states that prefill has kept. A migrated request skips that: it begins with a normal round.
#pragma once

#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "core/finish_reason.h"
#include "scheduler/prefix_cache.h"

namespace specdec::scheduler {

enum class RequestState { kQueued, kPrefilling, kStarting, kBeginning, kRunning, kFinished };

// Totals of a request since it was submitted, over the rounds that gave it tokens, without first rounds (for which
// nothing was drafted).
struct RoundCounts {
  int64_t rounds = 0;
  int64_t drafted = 0;   // tree nodes without the root
  int64_t accepted = 0;  // tokens without the bonus
  int64_t cached = 0;    // rows of its prompt that the prefix cache had when it began
};

// Sampling parameters of a request: slot state, as verify_tree takes it.
struct Sampling {
  float temperature = 0;
  int32_t top_k = 0;
  float top_p = 1, min_p = 0;
  int64_t seed = 0;
};

// Log-probabilities of tokens, for requests that want them: of each token, and of the best entries of the logits that
// it was chosen from.
struct Scores {
  std::vector<float> logprobs;
  std::vector<int32_t> top_ids;     // num_logprobs a token, best first
  std::vector<float> top_logprobs;  // of top_ids
};

// A copy of the recurrent states after the first pages of a text.
struct Snapshot {
  int64_t pages;
  int32_t id;
};

constexpr int64_t kNoDeadline = std::numeric_limits<int64_t>::max();

// Members that every round reads or writes come first, in two cache lines. A loop that has waited for a round finds its
// caches cold, and fetching each line of each request costs more than the work on it.
struct alignas(64) Request {
  int64_t id;
  std::vector<int32_t> text;  // the prompt and every token read so far; the last one is the root
  int64_t emitted;            // how much of `text` has been emitted, the prompt included
  int64_t remaining;          // how many tokens it may still produce
  int64_t in_flight = 0;      // rounds it takes part in that are launched and not yet read
  uint64_t last_round = 0;    // number of the last round it took part in
  int64_t num_validated = 0;  // rows of its slot that a round, which has been read, found correct
  RoundCounts counts = {};
  RequestState state = RequestState::kQueued;
  int32_t slot = -1;
  int32_t num_shared = 0;  // first pages of its slot that belong to the prefix cache
  // Alternatives wanted with each token's log-probability; -1: not even that.
  int32_t num_logprobs = -1;
  int32_t max_nodes;          // most nodes of its tree in any round, the root included
  int32_t draft_lag = 0;      // upper bound of the rounds for which its draft has been idle since it last caught up
  bool constrained = false;   // the executor constrains its next tokens
  bool streams;               // publishes updates after every round, not only at its end
  bool migrated = false;      // its KV rows come from another engine, and the executor's `begin` writes them
  bool cacheable = true;      // its pages may serve others: false for rows of an engine that is not trusted
  bool shares_prefix = true;  // it may begin with cached pages: false if every row of its prompt has to be computed

  int32_t stops_from = 0;        // first position where a stop token counts; 0: any
  int64_t num_known_tokens = 0;  // tokens of `text` that the executor has, if it is constrained
  int64_t prefilled = 0;         // rows of text whose KV is written, while prefilling; the root's is the last of them
  std::vector<int32_t> stop_tokens;
  Sampling sampling = {};
  int32_t ngram_group = 0;
  int32_t priority = 0;
  int64_t client = 0;                    // as in Submission
  int64_t turn = 0;                      // in the queue, within its priority; see Scheduler::queue
  std::shared_ptr<int64_t> tail = {};    // shared by its client's waiting requests; see Scheduler::queue
  int64_t deadline = kNoDeadline;        // of round::nanoseconds
  std::shared_ptr<void> extra = {};      // as in Admitted
  PrefixCache::Node* prefix = nullptr;   // the shared pages, locked; null: none
  int64_t branch = 0;                    // pages of its text that were cached when it got its slot, shared or not
  std::vector<Snapshot> snapshots = {};  // saved from its slot, of pages that are not cached yet
  std::unique_ptr<Scores> scores = {};   // of the tokens not yet emitted, if they are wanted

  // Orders requests in the queue, in prefill, and in keeping a slot: lower ranks come first.
  std::tuple<int32_t, int64_t, int64_t> rank() const { return {priority, turn, id}; }
  int64_t seq_len() const { return static_cast<int64_t>(text.size()) - 1; }
  bool running() const { return state == RequestState::kRunning; }
  bool wants_drafts() const { return max_nodes > 1; }
  int64_t rows_to_prefill() const { return state == RequestState::kPrefilling ? std::ssize(text) - prefilled : 0; }

  // Returns whether the request may still need tokens after the rounds in flight. Each of them gives it at least one
  // token unless it stalls, which is known when the round is read.
  bool wants_another_round(int64_t max_len) const {
    return running() && in_flight < remaining && static_cast<int64_t>(text.size()) + in_flight < max_len;
  }

  void take_slot(int32_t new_slot) {
    state = RequestState::kPrefilling;
    slot = new_slot;
    num_validated = 0;
    in_flight = 0;
    draft_lag = 0;
  }
  // Loses nothing: `text` holds the tokens produced so far, and is prefilled again like a prompt.
  void leave_slot(RequestState next) {
    state = next;
    slot = -1;
    migrated = false;
    cacheable = true;  // its rows will be this engine's own
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
  // Appends the tokens that have not been emitted yet, and returns how many these are.
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
