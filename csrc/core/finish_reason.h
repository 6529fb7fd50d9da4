// Why a request ended; Python's `FinishReason` names the same.
#pragma once

#include <cstdint>

namespace specdec {

enum class FinishReason : int32_t {
  kRunning = 0,
  // What finish_reasons[slot] can say:
  kStop = 1,     // a stop token, kept as the last one
  kLength = 2,   // the budget of new tokens is used up
  kContext = 3,  // the sequence reached its maximal length
  // What the scheduler alone can say:
  kCancelled = 4,
  kError = 5,    // the slot's status says why
  kTimeout = 6,  // it did not end in the time that it was given
};

}  // namespace specdec
