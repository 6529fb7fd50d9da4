// The layout of a KV tile of latent rows in shared memory.
#pragma once

#include "mla/sm90/latent_maps.h"

namespace specdec::mla {

// 64 tokens of 512 + 64 elements of 16 bits, in three parts with a barrier each: columns 0 to 255, 256 to 511, and the
// 64 rotated ones. Each half of the output needs one of the first two parts as V; scores need all three as K.
//
// A part has 8 groups of 8 tokens; a group has the part's panels; a panel has 64 elements (128 bytes) of each token:
// element c of token j of a part of n panels lies at 1024 (n (j / 8) + c / 64) + 128 (j % 8) + (2 (c % 64) ^ 16 (j %
// 8)). wgmma reads this 128-byte swizzle directly, K-major as K and MN-major as V.
struct LatentTile {
  static constexpr int kTokens = 64, kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
  static constexpr int kGroupTokens = 8, kPanelBytes = 1024;
  enum Part { kLeft, kRight, kRotated };
  static constexpr int kParts = 3;

  // Panels of a part, the first of them among those of a row, and where the part begins.
  __host__ __device__ static constexpr int panels(int part) { return part == kRotated ? 1 : 4; }
  __host__ __device__ static constexpr int first_panel(int part) { return 4 * part; }
  __host__ __device__ static constexpr int start(int part) { return first_panel(part) * kTokens * 128; }
  // Return the bytes from a group of 8 tokens to the next.
  __host__ __device__ static constexpr int group_bytes(int part) { return panels(part) * kPanelBytes; }

  unsigned char bytes[kTokens * kWidth * 2];
};

}  // namespace specdec::mla
