// FinishReason: why a request ended, as in Python's `FinishReason`.
#pragma once

#include <cstdint>

namespace specdec {

enum class FinishReason : int32_t {
  kRunning = 0,
  // In finish_reasons[slot], and from the scheduler:
  kStop = 1,     // a stop token, kept as the last one
  kLength = 2,   // max_new_tokens reached
  kContext = 3,  // the sequence reached its maximal length
  // From the scheduler only:
  kCancelled = 4,
  kError = 5,    // see the slot's status
  kTimeout = 6,  // the request's time limit passed
};

}  // namespace specdec
