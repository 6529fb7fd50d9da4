// Finds the address of a ring on the device.
#pragma once

#include "core/check.h"

namespace specdec::round {

// Returns the ring's words. The ring is on the device of the tensors that `check` has seen or, if these are on CUDA, in
// pinned host memory. Throws ValueError otherwise.
int32_t* shared_words(const Check& check, const char* name, const TensorView& ring);

// Returns the current device's address of pinned host memory, or null if the memory is not pinned (CUDA builds only).
void* device_address(void* host);

}  // namespace specdec::round
