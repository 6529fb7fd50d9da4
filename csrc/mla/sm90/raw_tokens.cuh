// RawTokens: how a producer warp brings 16 tokens of 8-bit latent rows into a KV tile of 16 bits.
//
// A part of the tokens is copied as it is into the first half of the room that it takes in the tile, and dequantized in
// place, 8 tokens at a time: all of them are read before they are written. So no other shared memory is needed.
#pragma once

#include "mla/dequantize.cuh"
#include "mla/sm90/latent_tile.cuh"

namespace specdec::mla {

// Where 16 tokens begin and which of them are present: lane l has the start of token l % 16 in units of 16 bytes, 0 if
// it is absent.
struct Tokens {
  uint32_t start, present;
};

template <class T, class Row>
struct RawTokens {
  static constexpr bool k656 = std::is_same_v<Row, Row656>;
  static constexpr int kTokens = kBoxTokens, kGroupTokens = LatentTile::kGroupTokens;

  // The rotated part of a row of 656 bytes has 16 bits.
  static constexpr bool has(int part) { return part != LatentTile::kRotated || !k656; }

  // Start to copy a part as it is to where it begins in the tile, with zeros for absent tokens.
  template <int kPart>
  __device__ __forceinline__ static void copy(unsigned char* to, const char* pool, Tokens tokens) {
    constexpr int kPieces = 4 * LatentTile::panels(kPart), kTokensPerStep = kWarp / kPieces;
    const int lane = threadIdx.x % kWarp, my_token = lane / kPieces, piece = lane % kPieces;
    const auto there = static_cast<uint32_t>(__cvta_generic_to_shared(to));
#pragma unroll
    for (int n = 0; n < kTokens; n += kTokensPerStep) {
      const int token = n + my_token;
      const char* const from = pool + __shfl_sync(kFullMask, tokens.start, token) * int64_t{16} +
                               64 * LatentTile::first_panel(kPart) + 16 * piece;
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                       there + token / kGroupTokens * LatentTile::group_bytes(kPart) +
                       raw_offset<kPart>(token % kGroupTokens, piece)),
                   "l"(from), "r"(tokens.present >> token & 1 ? 16 : 0)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Return the factor of token l % 16 in lane l: for the first 128 columns of the part if l < 16, else for the last.
  __device__ __forceinline__ static float load_factor(const char* pool, int part, Tokens tokens) {
    if (!k656) return 1;
    const int lane = threadIdx.x % kWarp;
    const char* const from = pool + tokens.start * int64_t{16} + Row656::kScales + 8 * part + lane / 16 * 4;
    return tokens.present >> lane % 16 & 1 ? __ldcg(reinterpret_cast<const float*>(from)) : 0;
  }

  // Wait for a part, which has been copied before the last kLater parts, and dequantize it. `factor` as loaded.
  template <int kPart, int kLater>
  __device__ __forceinline__ static void dequantize(unsigned char* at, float factor) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
    __syncwarp();
    // A warp has 8 tokens of the rotated part at once, or two of another. Of eight lanes in a row, which access banks
    // of their own, four are at the same token.
    constexpr int kSteps = LatentTile::panels(kPart), kTokensPerStep = kGroupTokens / kSteps;
    const int lane = hold(threadIdx.x % kWarp), panel = lane / (4 * kTokensPerStep),
              my_token = lane / 4 % kTokensPerStep;
#pragma unroll
    for (int group = 0; group < kTokens / kGroupTokens; ++group, at += LatentTile::group_bytes(kPart)) {
      uint4 x[kSteps];
#pragma unroll
      for (int n = 0; n < kSteps; ++n)
        x[n] = *reinterpret_cast<const uint4*>(at +
                                               raw_offset<kPart>(n * kTokensPerStep + my_token, 4 * panel + lane % 4));
      __syncwarp();
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        const int token = n * kTokensPerStep + my_token;
        const float f = k656 ? __shfl_sync(kFullMask, factor, lane / 16 * 16 + group * kGroupTokens + token) : 1;
        uint4 y[2];
        specdec::mla::dequantize<T>(x[n], f, y);
        unsigned char* const line = at + panel * LatentTile::kPanelBytes + token * 128;
#pragma unroll
        for (int h = 0; h < 2; ++h) *reinterpret_cast<uint4*>(line + ((lane % 4 * 2 + h) ^ token) * 16) = y[h];
      }
    }
  }

 private:
  // Return where 16 bytes of one of 8 tokens lie as copied. Adjacent tokens have their halves of 128 bytes in different
  // order, so that lanes that read both access banks of their own.
  template <int kPart>
  __device__ static int raw_offset(int token, int piece) {
    constexpr int kBytes = 64 * LatentTile::panels(kPart);
    return token * kBytes + (16 * piece ^ (kBytes > 64 ? token % 2 * 64 : 0));
  }
};

}  // namespace specdec::mla
