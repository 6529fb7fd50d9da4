// The memory through which ranks exchange rows: one buffer per rank, which the others write, and one state per rank.
//
// A buffer holds kPhases * size * capacity packs of 16 bytes: those of phase 0 from each rank, then phase 1, then 2.
// Call c uses phase c % kPhases on all ranks. A rank writes its packs to every other rank's buffer, and reads the
// others' from its own. The payload is its own flag: a word that has not arrived is kEmpty, which no rank writes (a
// negative zero is written as zero). Words may arrive in any order.
//
// No barrier is needed. Call c empties what call c - 1 has read. A rank writes that phase again in call c + 2, thus
// after it has read all of call c + 1, which this rank wrote after call c.
#pragma once

#include "core/dispatch.h"
#include "core/host_device.h"

namespace specdec::parallel {

constexpr int kPhases = 3;
constexpr int kMaxRanks = 8;
constexpr int kPackBytes = 16, kPackWords = 4;
constexpr uint32_t kEmpty = 0x80000000u;

// Zeros at first, but for the alarm. Written by this rank only.
struct ExchangeState {
  uint32_t calls;  // finished; the same on all ranks
  uint32_t ticket;
  uint32_t timed_out;         // 1 + rank once a wait for it has exceeded its time: later calls neither write nor wait
  uint32_t written[kPhases];  // packs of each rank in the last call of a phase
  uint32_t* alarm;            // of the host: the same word; null: none
};
constexpr int64_t kStateWords = sizeof(ExchangeState) / sizeof(uint32_t);

struct ExchangeParams {
  const void* x;         // [rows, width]
  char* const* buffers;  // [size]: of each rank, at this rank's addresses
  ExchangeState* state;
  int64_t rows, width, size, rank;
  int64_t capacity;    // packs of one rank and phase
  int64_t timeout_ns;  // of one wait
  Dtypes dtype;
};

// Return the first pack of rank `source` in a phase of a buffer.
SD_HD int64_t first_pack(const ExchangeParams& p, uint32_t phase, int64_t source) {
  return (static_cast<int64_t>(phase) * p.size + source) * p.capacity;
}

// Note that a wait for rank `source` has exceeded its time, for this rank's calls and for its host.
SD_HD void set_timed_out(ExchangeState& state, int source) {
  const uint32_t word = 1 + static_cast<uint32_t>(source);
  *static_cast<volatile uint32_t*>(&state.timed_out) = word;
  if (state.alarm != nullptr) *static_cast<volatile uint32_t*>(state.alarm) = word;
}

SD_HD uint32_t without_negative_zero(uint32_t word) { return word == kEmpty ? 0 : word; }

// Check the arguments that all exchanges have; x must be contiguous.
ExchangeParams check_exchange(Check& check, const TensorView& x, const TensorView& buffers, const TensorView& state,
                              int64_t rank, int64_t capacity, double timeout, Dim& rows, Dim& width, Dim& size);

}  // namespace specdec::parallel
