// Bits of 64-bit mask words, the same on both devices.
#pragma once

#include <bit>
#include <cstdint>

#include "core/host_device.h"

namespace specdec {

// Return a word whose lowest n bits are set, for any n.
SD_HD uint64_t low_bits(int64_t n) { return n <= 0 ? 0 : n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

// Return word `word` of a mask in which only bit `bit` is set.
SD_HD uint64_t own_bit(int64_t bit, int64_t word) { return bit >> 6 == word ? uint64_t{1} << (bit & 63) : 0; }

SD_HD int count_bits(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return __popcll(bits);
#else
  return std::popcount(bits);
#endif
}

// Return the index of the highest set bit; `bits` is not 0.
SD_HD int highest_bit(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return 63 - __clzll(static_cast<long long>(bits));
#else
  return 63 - std::countl_zero(bits);
#endif
}

}  // namespace specdec
