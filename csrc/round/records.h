// Words of the two rings through which host and device talk, the same on both sides. A ring is [depth, words] int32 in
// memory that both can reach; record number n stands in row n % depth.
//
// Commands, written by the host, applied once by apply_commands:
//
//   0         number of the record + 1, written by the device: applied, the row may be written again
//   1         how many slots to activate; fewer than 1 is none
//   2         [max_batch] slots of the round, -1 behind them
//   then      [num_slots] slots given back, -1 behind them
//   then      of each slot to activate, all different: slot, seq_len, root token, remaining, temperature, top_k, top_p,
//             min_p (floats as their bits), seed (two words, the lower one first), stops_from, num_logprobs, max_nodes
//             and max_stops stop tokens
//
// Results, written by the device, one record a round:
//
//   0         number of the round + 1, written last
//   2, 4      when its commands were applied and when it published, in ns of the device's clock (two words each)
//   6         how many of its requests go on
//   8         [num_rungs] drafts that these were expected to have accepted, by the scores of the nodes that each rung
//             would have verified (floats as their bits), and [num_rungs] that they would have had accepted
//   then      for each row num_valid, finish reason, status, num_nodes and accept_width tokens: what the host reads of
//             every round stands together
//   last      with scores, for each row, the last row first: the log-probability of each token (floats as their bits),
//             the ids of the top_n best entries beside each, and their log-probabilities, which are only written for
//             slots that asked
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace specdec::round {

struct CommandLayout {
  int64_t max_batch, num_slots, max_stops;

  enum : int64_t { kApplied, kNumActivated, kSlots };
  enum : int64_t { kSlot, kSeqLen, kRoot, kRemaining, kTemperature, kTopK, kTopP, kMinP, kSeed };  // of an activation
  enum : int64_t { kStopsFrom = kSeed + 2, kNumLogprobs, kMaxNodes, kStops };                      // likewise
  SD_HD int64_t given_back() const { return kSlots + max_batch; }
  SD_HD int64_t activation(int64_t i) const { return given_back() + num_slots + i * (kStops + max_stops); }
  SD_HD int64_t words() const { return activation(num_slots); }
};

constexpr int64_t kMostRungs = 32;

struct ResultLayout {
  int64_t accept_width, num_rungs;
  int64_t top_n = kNoScores;

  enum : int64_t { kNoScores = -1 };
  enum : int64_t { kNumber, kStarted = 2, kEnded = 4, kNumGoingOn = 6, kExpected = 8 };
  enum : int64_t { kNumValid, kFinishReason, kStatus, kNumNodes, kTokens };  // of a row
  SD_HD int64_t realised() const { return kExpected + num_rungs; }
  SD_HD int64_t row_words() const { return kTokens + accept_width; }
  SD_HD int64_t row(int64_t b) const { return realised() + num_rungs + b * row_words(); }

  SD_HD int64_t top_ids() const { return accept_width; }                           // of the scores of a row
  SD_HD int64_t top_logprobs() const { return top_ids() + accept_width * top_n; }  // likewise
  SD_HD int64_t score_words() const { return top_n == kNoScores ? 0 : top_logprobs() + accept_width * top_n; }
  // In a record of so many words.
  SD_HD int64_t scores(int64_t b, int64_t words) const { return words - (b + 1) * score_words(); }

  // Even, since records start at multiples of 8 bytes.
  SD_HD int64_t words(int64_t batch) const { return (row(batch) + batch * score_words() + 1) / 2 * 2; }
};

// Row of a ring that record number n stands in, in bounds whatever n is.
SD_HD int64_t ring_row(int64_t n, int64_t depth) {
  return static_cast<int64_t>(static_cast<uint64_t>(n) % static_cast<uint64_t>(depth));
}

// What word 0 of record n says once the device is done with it.
SD_HD int32_t done_mark(int64_t n) { return static_cast<int32_t>(static_cast<uint32_t>(n) + 1); }

}  // namespace specdec::round
