// Applies the host's next command record to the slot state.
#pragma once

#include <bit>

#include "core/dispatch.h"
#include "core/slots.h"
#include "round/records.h"

namespace specdec::round {

struct ApplyCommandsParams {
  int32_t* commands;     // [depth, layout.words()]
  int64_t* num_applied;  // [1]: records applied so far
  int64_t* started_at;   // [1]: when the last one was applied
  // Slot state.
  int32_t* seq_lens;        // [num_slots]
  int32_t* root_tokens;     // [num_slots]
  int32_t* remaining;       // [num_slots]
  int32_t* stop_tokens;     // [num_slots, max_stops]
  float* temperature;       // [num_slots]
  int32_t* top_k;           // [num_slots]
  float* top_p;             // [num_slots]
  float* min_p;             // [num_slots]
  int64_t* seeds;           // [num_slots]
  int32_t* stops_from;      // [num_slots]
  int32_t* num_logprobs;    // [num_slots]
  int32_t* max_nodes;       // [num_slots]
  int32_t* finish_reasons;  // [num_slots]
  int32_t* status;          // [num_slots]
  // Outputs.
  int32_t* slots;       // [max_batch]: of the round
  int32_t* given_back;  // [num_slots]
  int64_t depth;
  CommandLayout layout;
};

void apply_commands(CallStream stream, const TensorView& commands, const TensorView& num_applied,
                    const TensorView& started_at, const TensorView& seq_lens, const TensorView& root_tokens,
                    const TensorView& remaining, const TensorView& stop_tokens, const TensorView& temperature,
                    const TensorView& top_k, const TensorView& top_p, const TensorView& min_p, const TensorView& seeds,
                    const TensorView& stops_from, const TensorView& num_logprobs, const TensorView& max_nodes,
                    const TensorView& finish_reasons, const TensorView& status, const TensorView& out_slots,
                    const TensorView& out_given_back);

void apply_commands_cpu(const ApplyCommandsParams& p);
void apply_commands_cuda(const ApplyCommandsParams& p, Stream stream);

// Resets the state of a slot to that of a free one.
SD_HD void reset_slot(const ApplyCommandsParams& p, int64_t slot) {
  p.seq_lens[slot] = 0;
  p.finish_reasons[slot] = 0;
  p.status[slot] = 0;
}

// Sets the state of an activated slot, except for the stop tokens. The status stays: prefill may have set it. A stalled
// slot got no pages when it began, so its prefilled rows are lost.
SD_HD void activate_slot(const ApplyCommandsParams& p, int64_t slot, const int32_t* words) {
  using Layout = CommandLayout;
  p.seq_lens[slot] = words[Layout::kSeqLen];
  p.root_tokens[slot] = words[Layout::kRoot];
  p.remaining[slot] = words[Layout::kRemaining];
  p.temperature[slot] = std::bit_cast<float>(words[Layout::kTemperature]);
  p.top_k[slot] = words[Layout::kTopK];
  p.top_p[slot] = std::bit_cast<float>(words[Layout::kTopP]);
  p.min_p[slot] = std::bit_cast<float>(words[Layout::kMinP]);
  const uint64_t low = static_cast<uint32_t>(words[Layout::kSeed]);
  const uint64_t high = static_cast<uint32_t>(words[Layout::kSeed + 1]);
  p.seeds[slot] = static_cast<int64_t>(high << 32 | low);
  p.stops_from[slot] = words[Layout::kStopsFrom];
  p.num_logprobs[slot] = words[Layout::kNumLogprobs];
  p.max_nodes[slot] = words[Layout::kMaxNodes];
  p.finish_reasons[slot] = 0;
  if (p.status[slot] & kStalled) set_status(p.status, slot, kBadPage);
}

}  // namespace specdec::round
