// The formats of a latent row: what the cache of multi-head latent attention holds per token, in every layer.
//
// A row is the compressed KV, latent_dim elements, then the rotated key that all heads share. Its key is the whole row,
// its value the first latent_dim elements.
#pragma once

#include "core/floats.h"

namespace specdec::mla {

constexpr int64_t kMaxLatent = 512, kMaxWidth = 576;

// The published row of 656 bytes (DeepSeek's FlashMLA): 512 float8_e4m3fn of the latent, 4 float32 factors, one for
// each 128 of them, then 64 bfloat16 of the shared key, which is not quantized.
struct Row656 {
  static constexpr int kLatent = 512, kRope = 64, kGroup = 128, kBytes = 656;
  static constexpr int kScales = kLatent, kRopeBytes = kScales + kLatent / kGroup * 4;  // offsets in bytes
};

// Return element d of a row of elements of type Row, or of a Row656.
template <class Row>
SD_HD float latent_element(const char* row, int64_t d) {
  if constexpr (std::is_same_v<Row, Row656>) {
    if (d >= Row656::kLatent)
      return to_float(reinterpret_cast<const BFloat16*>(row + Row656::kRopeBytes)[d - Row656::kLatent]);
    return to_float(reinterpret_cast<const Float8*>(row)[d]) *
           reinterpret_cast<const float*>(row + Row656::kScales)[d / Row656::kGroup];
  } else {
    return to_float(reinterpret_cast<const Row*>(row)[d]);
  }
}

}  // namespace specdec::mla
