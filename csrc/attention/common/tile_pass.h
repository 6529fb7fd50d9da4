// TilePass: attention of up to 64 rows over KV tiles of 64 tokens on the CPU.
//
// An op gathers the tokens of a tile as contiguous float32, sets which rows see them, and calls add_tile(), whose inner
// loops all run along a vector.
#pragma once

#include <cstdint>

namespace specdec::attention {

// State of a pass between tiles, and one tile of KV. Rows are padded with zeros to a multiple of kRowsPerStep.
struct TilePass {
  static constexpr int kTokens = 64, kRows = 64;
  static constexpr int kRowsPerStep = 4;  // rows that share the registers of an inner loop

  int rows;                 // at most kRows, a multiple of kRowsPerStep
  int key_dim, value_dim;   // multiples of 16
  int value_stride;         // from one token of v to the next
  float soft_cap;           // 0: none
  float* q;                 // [kRows, key_dim], scaled to log2 units
  float* k_rows;            // [kTokens, key_dim]
  float* k;                 // [key_dim, kTokens]: scratch of add_tile()
  float* v;                 // [kTokens, value_stride]; the first value_dim columns count
  float* scores;            // [kRows, kTokens], then probabilities
  float* out;               // [kRows, value_dim], not yet divided by sum
  float max[kRows];         // of the scores so far
  float sum[kRows];         // of 2^(score - max)
  float rescale[kRows];     // for this tile: factor of earlier sums under the new max
  uint64_t visible[kRows];  // for this tile: bit j is set if the row attends to token j

  // Return a pass with scratch memory of the calling thread, which its next pass reuses. With values_in_keys, v is
  // k_rows: a token's value is the start of its key.
  static TilePass allocate(int64_t key_dim, int64_t value_dim, bool values_in_keys);
  // Begin `count` rows: no token seen, queries zero.
  void begin(int64_t count);
  // Attend from all rows to the tile in k_rows and v, as far as `visible` says.
  void add_tile();
  // Return the natural logarithm of a row's sum of exponentials; -inf if it saw nothing.
  float lse(int64_t row) const;
};

}  // namespace specdec::attention
