// The sizes the scheduler decides with, fixed for its life.
#pragma once

#include <cstdint>
#include <vector>

namespace specdec::scheduler {

struct Config {
  int64_t num_slots;
  int64_t num_pages;  // of the pool
  int64_t page_size;
  int64_t window;                    // rows behind which pages are given back; 0: none are
  int64_t max_len;                   // tokens of a sequence, with prompt and root
  int64_t reserve;                   // KV rows a round may touch beyond seq_len
  int64_t accept_width;              // S: most tokens a round gives a request
  int64_t max_stops;                 // most stop tokens of a request
  int64_t max_logprobs;              // most alternatives to a token whose scores results hold; -1: they hold none
  int64_t prefill_chunk;             // most prompt rows of one prefill call
  int64_t prefill_requests;          // most requests of one prefill or activate call
  int64_t rounds_in_flight;          // most rounds launched and not yet read; 1: no overlap
  bool draft_can_idle = false;       // the draft writes no rows of rounds with a node for each request
  bool prefix_cache = false;         // pages of requests that end, or run, serve others with the same prefix
  std::vector<int64_t> batch_sizes;  // rising: a round is padded to the next of them
  // Of each batch size, rising from it on: how many rows its rounds may have in all.
  std::vector<std::vector<int64_t>> rows;
  // Of each of these, nodes that a request may have drafted: as many as the round cuts it to and more, whose scores say
  // what larger rounds would bring. Empty: nothing is known of those.
  std::vector<std::vector<int64_t>> drafted = {};
  // A round whose requests all want no drafts has a row for each, whatever `rows` has.
  bool plain_rounds = false;
  // Rounds of a row for each leave the draft at rest, which can keep so many rows of a request, and has to catch up
  // before more of them, or before it drafts. 0: it does not rest, or need not catch up.
  int64_t max_idle_rounds = 0;

  // Levels that rounds tell apart; 0 where there is nothing to choose.
  int64_t num_levels() const;
  int64_t max_batch() const { return batch_sizes.back(); }
  // Of all rounds, the plain ones among them.
  std::vector<std::vector<int64_t>> all_rows() const;
};

// Throws ValueError for sizes that cannot work, such as a pool that one longest sequence would overflow.
void check_config(const Config& config);

}  // namespace specdec::scheduler
