// Philox4x32-10, a counter-based random generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011), identical on CPU and GPU.
//
// Noise is a function of its counter, so there is no state: a request's tokens depend on its seed and on the absolute
// position of the sampled token, not on the rest of the batch, the slot or the number of rounds.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace specdec {

// The purpose of a random value. Purposes never share a counter, so their noise is independent.
enum class NoiseUse : uint32_t {
  kToken = 0,  // sampling a token from the target's distribution, or from the residual after rejections
  kCoin = 1,   // acceptance of a sampled draft; `draw` is its index among its siblings
  kDraft = 2,  // sample_draft; `block` is the block of ids
};

struct Noise {
  uint32_t words[4];
  SD_HD uint64_t u64() const { return static_cast<uint64_t>(words[0]) << 32 | words[1]; }
};

SD_HD Noise noise(uint64_t seed, NoiseUse use, uint32_t position, uint32_t draw, uint32_t block = 0) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = position, c1 = draw, c2 = block, c3 = static_cast<uint32_t>(use);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace specdec
