// Slot addressing and the sticky per-slot status word, the same on CPU and GPU.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace specdec {

// Bits of status[slot], as in Python's `Status`. Device code never throws: it sets a bit and stays in bounds.
enum StatusBit : int32_t {
  kStalled = 1,      // alloc_pages or fork_pages could not serve the slot; cleared when they can
  kBadTree = 2,      // a malformed tree: cycle, child before parent, second root, node out of range
  kBadPage = 4,      // a page id outside the pool, or a table entry missing where a row must be
  kBadLength = 8,    // a length that is negative or beyond the page table
  kSharedPage = 16,  // a write into a page with more than one owner, refused
  kBadLogits = 32,   // a row of logits with no entry above -inf
};

// Return a slot, or -1 if it is out of range.
SD_HD int64_t valid_slot(int64_t slot, int64_t num_slots) { return slot >= 0 && slot < num_slots ? slot : -1; }

// Return the slot of row b, or -1 for an empty row (slots[b] < 0 or out of range).
SD_HD int64_t slot_of(const int32_t* slots, int64_t b, int64_t num_slots) {
  return valid_slot(slots ? slots[b] : b, num_slots);
}

// Set status bits of a slot; does nothing if `status` is null.
SD_HD void set_status(int32_t* status, int64_t slot, int32_t bits) {
  if (status == nullptr || slot < 0) return;
#ifdef __CUDA_ARCH__
  atomicOr(status + slot, bits);
#else
  status[slot] |= bits;
#endif
}

SD_HD void clear_status(int32_t* status, int64_t slot, int32_t bits) {
  if (status == nullptr || slot < 0) return;
#ifdef __CUDA_ARCH__
  atomicAnd(status + slot, ~bits);
#else
  status[slot] &= ~bits;
#endif
}

}  // namespace specdec
