// finish_reasons[slot]; Python's `FinishReason` names the same.
#pragma once

#include <cstdint>

namespace specdec {

enum FinishReason : int32_t {
  kRunning = 0,
  kStop = 1,     // a stop token, kept as the last one
  kLength = 2,   // the budget of new tokens is used up
  kContext = 3,  // the sequence reached its maximal length
};

}  // namespace specdec
