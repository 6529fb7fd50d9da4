// Defines the words of the two rings between host and device, the same on both sides. A ring is [depth, words] int32 in
// memory that both can access; record number n is in row n % depth.
//
// Commands, written by the host, applied once by apply_commands:
//
//   0         number of the record + 1, written by the device: applied, the row may be reused
//   1         how many slots to activate; none if below 1
//   2         [max_batch] slots of the round, padded with -1
//   then      [num_slots] slots given back, padded with -1
//   then      for each slot to activate, all distinct: slot, seq_len, root token, remaining, temperature, top_k, top_p,
//             min_p (floats as bits), seed (two words, low word first), stops_from, num_logprobs, max_nodes and
//             max_stops stop tokens
//
// Results, written by the device, one record per round:
//
//   0         number of the round + 1, written last
//   2, 4      when its commands were applied and when it was published, in ns of the device's clock (two words each)
//   6         how many of its requests continue
//   8         [num_levels] drafts predicted to be accepted, by the scores of the nodes that each budget level would
//   have
//             verified (floats as bits), and [num_levels] drafts that would have been accepted; both summed over the
//             requests that continue
//   then      for each row num_valid, finish reason, status, num_nodes and accept_width tokens: the words that the host
//             reads every round are contiguous
//   last      with scores, for each row, the last row first: the log-probability of each token (floats as bits), the
//             ids of the top_n best entries for each token, and their log-probabilities, written only for slots that
//             asked for them
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace specdec::round {

struct CommandLayout {
  int64_t max_batch, num_slots, max_stops;

  enum : int64_t { kApplied, kNumActivated, kSlots };
  enum : int64_t { kSlot, kSeqLen, kRoot, kRemaining, kTemperature, kTopK, kTopP, kMinP, kSeed };  // of an activation
  enum : int64_t { kStopsFrom = kSeed + 2, kNumLogprobs, kMaxNodes, kStops };                      // of an activation
  SD_HD int64_t given_back() const { return kSlots + max_batch; }
  SD_HD int64_t activation(int64_t i) const { return given_back() + num_slots + i * (kStops + max_stops); }
  SD_HD int64_t words() const { return activation(num_slots); }
};

constexpr int64_t kMaxLevels = 32;

struct ResultLayout {
  int64_t accept_width, num_levels;
  int64_t top_n = kNoScores;

  enum : int64_t { kNoScores = -1 };
  enum : int64_t { kNumber, kStarted = 2, kEnded = 4, kNumContinuing = 6, kPredicted = 8 };
  enum : int64_t { kNumValid, kFinishReason, kStatus, kNumNodes, kTokens };  // of a row
  SD_HD int64_t observed() const { return kPredicted + num_levels; }
  SD_HD int64_t row_words() const { return kTokens + accept_width; }
  SD_HD int64_t row(int64_t b) const { return observed() + num_levels + b * row_words(); }

  SD_HD int64_t top_ids() const { return accept_width; }                           // in the scores of a row
  SD_HD int64_t top_logprobs() const { return top_ids() + accept_width * top_n; }  // in the scores of a row
  SD_HD int64_t score_words() const { return top_n == kNoScores ? 0 : top_logprobs() + accept_width * top_n; }
  // Returns the first word of the scores of row b, in a record of `words` words.
  SD_HD int64_t scores(int64_t b, int64_t words) const { return words - (b + 1) * score_words(); }

  // Returns the words of a record: an even number, since records start at multiples of 8 bytes.
  SD_HD int64_t words(int64_t batch) const { return (row(batch) + batch * score_words() + 1) / 2 * 2; }
};

// Returns the row of record number n in a ring; in bounds for any n.
SD_HD int64_t ring_row(int64_t n, int64_t depth) {
  return static_cast<int64_t>(static_cast<uint64_t>(n) % static_cast<uint64_t>(depth));
}

// Returns the value of word 0 of record n once the device is done with it.
SD_HD int32_t done_mark(int64_t n) { return static_cast<int32_t>(static_cast<uint32_t>(n) + 1); }

}  // namespace specdec::round
