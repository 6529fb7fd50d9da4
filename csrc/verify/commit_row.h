// Rules of commit_tokens, shared by CPU and GPU: how many tokens of a row are committed and how its slot changes.
#pragma once

#include "core/finish_reason.h"
#include "core/host_device.h"
#include "core/slots.h"
#include "verify/commit_tokens.h"

namespace specdec::verify {

// State of one slot, loaded all at once.
struct SlotState {
  int32_t seq_len, remaining, max_len;
  FinishReason finish_reason;
  int32_t status;
};

SD_HD SlotState slot_state(const CommitTokensParams& p, int64_t slot) {
  return {p.seq_lens[slot], p.remaining[slot], p.max_seq_lens[slot], static_cast<FinishReason>(p.finish_reasons[slot]),
          p.status ? p.status[slot] : 0};
}

// Return whether `token` stops the slot's request. There is no early exit: independent loads overlap.
SD_HD bool is_stop(const CommitTokensParams& p, int64_t slot, int32_t token) {
  bool found = false;
  for (int64_t m = 0; m < p.max_stops; ++m) found |= p.stop_tokens[slot * p.max_stops + m] == token;
  return found && token >= 0;  // -1 pads stop_tokens
}

// Result for one row: number of committed tokens and the slot's finish reason. Nothing is written where `emits` is
// false.
struct Cut {
  int64_t kept = 0;
  FinishReason reason = FinishReason::kRunning;
  bool emits = false, bad_length = false;
};

SD_HD int64_t at_least_0(int64_t x) { return x > 0 ? x : 0; }

// Truncate a row of `len` tokens whose first stop token has index `stop` (beyond the row: there is none).
SD_HD Cut cut_row(const CommitTokensParams& p, const SlotState& slot, int32_t len, int64_t stop) {
  Cut cut;
  if (slot.finish_reason != FinishReason::kRunning || (slot.status & kStalled)) return cut;
  cut.bad_length = len < 0 || len > p.accept_width || slot.seq_len < 0;
  if (cut.bad_length || len == 0) return cut;

  cut.emits = true;
  cut.kept = len;
  const int64_t budget = at_least_0(slot.remaining);
  const int64_t room = at_least_0(slot.max_len - (int64_t{slot.seq_len} + 1));  // the root token counts, too
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

// Count an emitted token for the penalties, if counts are kept.
SD_HD void count_token(const CommitTokensParams& p, int64_t slot, int32_t token) {
  if (p.counts == nullptr || slot < 0 || token < 0 || token >= p.vocab) return;
  int32_t* count = p.counts + slot * p.vocab + token;
#ifdef __CUDA_ARCH__
  atomicAdd(count, 2);  // a token may occur more than once in a row
#else
  *count = add_wrapped(*count, 2);
#endif
}

// Write everything that row b changes, except the padding of its tokens and the counts.
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
