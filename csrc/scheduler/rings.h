// The host's side of the two rings (round/records.h).
#pragma once

#include <span>
#include <vector>

#include "round/records.h"
#include "scheduler/request.h"

namespace specdec::scheduler {

// Memory of a ring; pinned if the device is a GPU.
struct RingMemory {
  int32_t* words;  // [depth, width]
  int64_t depth, width;
  int32_t* row(int64_t number) const { return words + round::ring_row(number, depth) * width; }
};

// The contents of one command record.
struct Commands {
  std::span<Request* const> activated = {};
  std::span<const int32_t> slots = {};       // of the round
  std::span<const int32_t> given_back = {};  // slots
};

class CommandRing {
 public:
  CommandRing(const RingMemory& memory, const round::CommandLayout& layout) : memory_(memory), layout_(layout) {}

  // Returns whether the row of record `number` may be written, i.e. the record there before has been applied.
  bool is_free(int64_t number) const;
  void write(int64_t number, const Commands& commands) const;

 private:
  RingMemory memory_;
  round::CommandLayout layout_;
};

// One row of a round's results.
struct RowResult {
  int64_t num_valid;
  int32_t finish_reason, status, num_nodes;
  const int32_t* tokens;  // [accept_width]
  // Only if the request wants them; floats as bits.
  const int32_t* logprobs;                // [accept_width]
  const int32_t *top_ids, *top_logprobs;  // [accept_width, top_n]
  int64_t top_n;

  // Appends the scores of the first `count` tokens.
  void add_scores(int64_t count, int64_t num_logprobs, Scores& scores) const;
};

// Drafts that were predicted and would have been accepted at each budget level, summed over the requests that continue.
struct LevelResult {
  int64_t requests;
  std::vector<double> predicted, observed;  // [levels]
};

class ResultRing {
 public:
  ResultRing(const RingMemory& memory, const round::ResultLayout& layout) : memory_(memory), layout_(layout) {}

  bool is_published(int64_t number) const;
  RowResult row(int64_t number, int64_t b) const;
  LevelResult levels(int64_t number) const;
  // Return times in nanoseconds of the device's clock.
  int64_t started_at(int64_t number) const { return time(number, round::ResultLayout::kStarted); }
  int64_t ended_at(int64_t number) const { return time(number, round::ResultLayout::kEnded); }

 private:
  int64_t time(int64_t number, int64_t word) const;

  RingMemory memory_;
  round::ResultLayout layout_;
};

}  // namespace specdec::scheduler
