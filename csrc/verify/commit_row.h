// The rules of commit_tokens, the same on both devices: how much of a row stays, and what its slot becomes.
#pragma once

#include "core/finish_reason.h"
#include "core/host_device.h"
#include "core/slots.h"
#include "verify/commit_tokens.h"

namespace specdec::verify {

// What a row needs of its slot, read all at once.
struct SlotState {
  int32_t seq_len, remaining, max_len;
  FinishReason finish_reason;
  int32_t status;
};

SD_HD SlotState slot_state(const CommitTokensParams& p, int64_t slot) {
  return {p.seq_lens[slot], p.remaining[slot], p.max_seq_lens[slot], static_cast<FinishReason>(p.finish_reasons[slot]),
          p.status ? p.status[slot] : 0};
}

// Whether a token ends slot's request. No early exit: reads that do not wait for each other are the quicker ones.
SD_HD bool is_stop(const CommitTokensParams& p, int64_t slot, int32_t token) {
  bool found = false;
  for (int64_t m = 0; m < p.max_stops; ++m) found |= p.stop_tokens[slot * p.max_stops + m] == token;
  return found && token >= 0;  // -1 pads stop_tokens
}

// What a row comes to: `kept` tokens and the slot's finish reason; nothing where `emits` is false.
struct Cut {
  int64_t kept = 0;
  FinishReason reason = FinishReason::kRunning;
  bool emits = false, bad_length = false;
};

SD_HD int64_t at_least_0(int64_t x) { return x > 0 ? x : 0; }

// Cuts a row of `len` tokens of which the first stop is number `stop`, or none if that is beyond.
SD_HD Cut cut_row(const CommitTokensParams& p, const SlotState& slot, int32_t len, int64_t stop) {
  Cut cut;
  if (slot.finish_reason != FinishReason::kRunning || (slot.status & kStalled)) return cut;
  cut.bad_length = len < 0 || len > p.accept_width || slot.seq_len < 0;
  if (cut.bad_length || len == 0) return cut;

  cut.emits = true;
  cut.kept = len;
  const int64_t budget = at_least_0(slot.remaining);
  const int64_t room = at_least_0(slot.max_len - (int64_t{slot.seq_len} + 1));  // the root is one of the tokens, too
  if (cut.kept > budget) cut.kept = budget;
  if (cut.kept > room) cut.kept = room;
  cut.reason = cut.kept == budget ? FinishReason::kLength
               : cut.kept == room ? FinishReason::kContext
                                  : FinishReason::kRunning;
  if (stop < cut.kept) {
    cut.kept = stop + 1;
    cut.reason = FinishReason::kStop;
  }
  return cut;
}

// Counts a token that a slot has emitted, where somebody counts.
SD_HD void count_token(const CommitTokensParams& p, int64_t slot, int32_t token) {
  if (p.counts == nullptr || slot < 0 || token < 0 || token >= p.vocab) return;
  int32_t* count = p.counts + slot * p.vocab + token;
#ifdef __CUDA_ARCH__
  atomicAdd(count, 2);  // a token may stand in a row more than once
#else
  *count += 2;
#endif
}

// Writes all that row b changes, but for the padding of its tokens and the counts.
SD_HD void write_cut(const CommitTokensParams& p, int64_t b, int64_t slot, const SlotState& state, const Cut& cut) {
  const auto kept = static_cast<int32_t>(cut.kept);
  p.num_valid[b] = kept;
  p.out[b] = cut.reason == FinishReason::kRunning ? kept : 0;
  if (slot < 0) return;
  p.prefix_lens[slot] = state.seq_len;
  if (cut.bad_length) set_status(p.status, slot, kBadLength);
  if (cut.emits) p.finish_reasons[slot] = static_cast<int32_t>(cut.reason);
  if (kept > 0) {
    p.seq_lens[slot] = state.seq_len + kept;
    p.remaining[slot] = state.remaining - kept;
    p.root_tokens[slot] = p.tokens[b * p.accept_width + kept - 1];
  }
}

}  // namespace specdec::verify
