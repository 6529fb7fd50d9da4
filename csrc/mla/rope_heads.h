// rope_heads: rotates the rotated part of query heads, from one strided tensor to another.
#pragma once

#include "core/check.h"
#include "core/dispatch.h"
#include "mla/write_latent.h"

namespace specdec::mla {

struct RopeHeadsParams {
  const char* x;             // [rows, heads, rope]; strides in bytes
  char* out;                 // as x, with strides of its own; not x
  const float* cos_sin;      // [num_positions, rope]
  const int32_t* positions;  // [rows]
  int64_t rows, heads, rope_dim, num_positions;
  int64_t x_strides[2], out_strides[2];  // of a row and of a head
  Dtypes dtype;
  bool interleaved;
};

void rope_heads(CallStream stream, const TensorView& x, const TensorView& cos_sin, const TensorView& positions,
                bool interleaved, const TensorView& out);

void rope_heads_cpu(const RopeHeadsParams& p);
void rope_heads_cuda(const RopeHeadsParams& p, Stream stream);

// Rotate pair i of a head of a row.
template <class T>
SD_HD void rope_pair(const RopeHeadsParams& p, int64_t row, int64_t head, int64_t i) {
  const int64_t half = p.rope_dim / 2;
  const T* const from = reinterpret_cast<const T*>(p.x + row * p.x_strides[0] + head * p.x_strides[1]);
  T* const to = reinterpret_cast<T*>(p.out + row * p.out_strides[0] + head * p.out_strides[1]);
  const float* const turn = cos_sin_of(p.cos_sin, p.positions[row], p.num_positions, p.rope_dim);
  const RotatedPair pair = rotated_pair(i, half, p.interleaved);
  const float first = to_float(from[pair.first]), second = to_float(from[pair.second]);
  to[i] = from_float<T>(first * turn[i] - second * turn[half + i]);
  to[half + i] = from_float<T>(second * turn[i] + first * turn[half + i]);
}

}  // namespace specdec::mla
