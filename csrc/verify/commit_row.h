// One request's commit, the same on both devices.
#pragma once

#include "core/host_device.h"
#include "core/slots.h"
#include "verify/commit_tokens.h"
#include "verify/finish_reason.h"

namespace specdec {

SD_HD bool is_stop(const CommitTokensParams& p, int64_t slot, int32_t token) {
  if (token < 0) return false;  // -1 pads stop_tokens
  for (int64_t m = 0; m < p.max_stops; ++m)
    if (p.stop_tokens[slot * p.max_stops + m] == token) return true;
  return false;
}

// How many tokens row b emits, 0 to accept_width, given the slot it works for; 0 where it may emit none.
SD_HD int64_t emitted(const CommitTokensParams& p, int64_t b, int64_t slot) {
  if (slot < 0 || p.finish_reasons[slot] != kRunning) return 0;
  if (p.status && (p.status[slot] & kStalled)) return 0;
  if (p.out_len[b] < 0 || p.out_len[b] > p.accept_width || p.seq_lens[slot] < 0) {
    set_status(p.status, slot, kBadLength);
    return 0;
  }
  return p.out_len[b];
}

SD_HD int64_t at_least_0(int64_t x) { return x > 0 ? x : 0; }

SD_HD void commit_row(const CommitTokensParams& p, int64_t b) {
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  int32_t* tokens = p.out_tokens + b * p.accept_width;
  int64_t kept = emitted(p, b, slot);
  bool goes_on = false;

  if (slot >= 0) p.seq_lens_before[slot] = p.seq_lens[slot];
  if (kept > 0) {
    const int64_t before = p.seq_lens[slot];
    const int64_t budget = at_least_0(p.remaining[slot]);
    const int64_t room = at_least_0(p.max_lens[slot] - (before + 1));  // the root is a token of the sequence, too
    if (kept > budget) kept = budget;
    if (kept > room) kept = room;

    int32_t reason = kept == budget ? kLength : kept == room ? kContext : kRunning;
    for (int64_t j = 0; j < kept; ++j) {
      if (!is_stop(p, slot, tokens[j])) continue;
      kept = j + 1;
      reason = kStop;
      break;
    }
    if (kept > 0) {
      p.seq_lens[slot] = static_cast<int32_t>(before + kept);
      p.root_tokens[slot] = tokens[kept - 1];
      p.remaining[slot] -= static_cast<int32_t>(kept);
    }
    p.finish_reasons[slot] = reason;
    goes_on = reason == kRunning;
  }
  for (int64_t j = kept; j < p.accept_width; ++j) tokens[j] = -1;
  p.out_len[b] = static_cast<int32_t>(kept);
  p.out_num_valid[b] = goes_on ? static_cast<int32_t>(kept) : 0;
}

}  // namespace specdec
