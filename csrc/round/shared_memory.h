// A ring's address for the device.
#pragma once

#include "core/check.h"

namespace specdec::round {

// The ring's words: it lies on the device of the tensors that `check` has seen, or, where these are on CUDA, in pinned
// host memory. Throws ValueError for anything else.
int32_t* shared_words(const Check& check, const char* name, const TensorView& ring);

// The address under which the current device reaches pinned host memory; null where it is not pinned (CUDA builds
// only).
void* device_address(void* host);

}  // namespace specdec::round
