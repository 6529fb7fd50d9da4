// The sizes that the scheduler works with, fixed for its life.
#pragma once

#include <cstdint>
#include <vector>

namespace specdec::scheduler {

struct Config {
  int64_t num_slots;
  int64_t num_pages;  // of the pool
  int64_t page_size;
  int64_t window = 0;              // of attention, in rows: pages before it are given back; 0: none are
  int64_t vocab_size = INT32_MAX;  // tokens below it are the target's
  int64_t max_len;                 // most tokens of a sequence, with prompt and root
  int64_t reserve;                 // KV rows that a round may use beyond seq_len
  int64_t accept_width;            // S: most tokens that a round gives a request
  int64_t max_stops;               // most stop tokens of a request
  int64_t max_logprobs = -1;       // most alternatives to a token in the results; -1: no log-probabilities
  int64_t prefill_chunk;           // most prompt rows of one prefill call
  int64_t prefill_requests;        // most requests of one prefill or activate call
  int64_t rounds_in_flight;        // most rounds launched and not yet read; 1: no overlap
  bool draft_can_idle = false;     // the draft writes no rows in rounds of one node per request
  bool prefix_cache = false;       // pages of requests, ended or running, serve others with the same prefix
  // Recurrent states of prefixes that the device can keep next to the slots' own. 0: the target has none, and pages
  // are all that a prefix needs.
  int64_t num_snapshots = 0;
  int64_t snapshot_pages = 1;        // of a prompt between two snapshots, its last whole page excepted
  int64_t lookahead = 1;             // tokens after a row that a draft's row depends on, at least the next one
  std::vector<int64_t> batch_sizes;  // increasing: a round is padded to the next of them
  // The budget levels of each batch size: rows that its rounds may have in all, increasing, at least the batch size.
  std::vector<std::vector<int64_t>> rows;
  // For each of these, the most nodes that are drafted for a request: at least as many as the round keeps. The scores
  // of the others predict the gain of higher levels. Empty: nothing is known about those.
  std::vector<std::vector<int64_t>> drafted = {};
  // A round whose requests all want no drafts has one row each, even if `rows` has no such level.
  bool plain_rounds = false;
  // Rounds of one row each leave the draft idle, for at most this many rounds of a request: then, or before it drafts
  // again, it has to catch up. 0: it is never idle, or need not catch up.
  int64_t max_idle_rounds = 0;

  // Returns the number of budget levels of the batch size that has the most; 0 if there is nothing to choose.
  int64_t num_levels() const;
  int64_t max_batch() const { return batch_sizes.back(); }
  // Returns the rows of all rounds, plain rounds included, for each batch size.
  std::vector<std::vector<int64_t>> all_rows() const;
};

// Throws ValueError for sizes that cannot work, such as a pool that one longest sequence would overflow.
void check_config(const Config& config);

}  // namespace specdec::scheduler
