// write_latent: everything between the first projection of latent attention and its cache. Normalizes the latent part
// of each row, rotates the rest, and writes the row to its page; may normalize what queries are made of in the same
// launch.
#pragma once

#include "kv/write_kv.h"

namespace specdec::mla {

constexpr int64_t kMaxNormWidth = 4096;  // elements of a row that a block holds in registers

struct WriteLatentParams {
  // Where rows are written. Its k points at the rows x [.., latent + rope] and its k_pool at the latent rows.
  kv::WriteKvParams write;
  const void* norm;          // [latent]
  const float* cos_sin;      // [num_positions, rope]: rope / 2 cosines, then as many sines; null: nothing is rotated
  const int32_t* positions;  // [batch, q_len] or [num_rows]; null without cos_sin
  kv::NewRows q;             // [batch, q_len, q_width] or packed [num_rows, q_width]; no data: none
  const void* q_norm;        // [q_width]
  char* q_out;               // [num_rows, q_width], contiguous
  int64_t num_rows;          // of all requests
  int64_t latent_dim, rope_dim, num_positions, q_width;
  float eps;
  bool interleaved;  // rotated pairs are neighbors in x; they are half a part apart in the cache either way
};

void write_latent(CallStream stream, const TensorView& x, const TensorView& norm, double eps, const TensorView& kv_pool,
                  const TensorView& page_table, const TensorView& prefix_lens, const OptTensor& cos_sin,
                  const OptTensor& positions, bool interleaved, int64_t row_offset, const OptTensor& slots,
                  const OptTensor& num_valid, const OptTensor& cu_seqlens_q, const OptTensor& page_refs,
                  double kv_scale, const OptTensor& q, const OptTensor& q_norm, const OptTensor& q_out,
                  const OptTensor& status);

void write_latent_cpu(const WriteLatentParams& p);
void write_latent_cuda(const WriteLatentParams& p, Stream stream);

// The elements of a rotated part that pair i consists of; in the result they are i and i + half.
struct RotatedPair {
  int64_t first, second;
};
SD_HD RotatedPair rotated_pair(int64_t i, int64_t half, bool interleaved) {
  return interleaved ? RotatedPair{2 * i, 2 * i + 1} : RotatedPair{i, i + half};
}

// Return the cosines and sines of a position, clamped to the table.
SD_HD const float* cos_sin_of(const float* cos_sin, int64_t position, int64_t num_positions, int64_t rope_dim) {
  return cos_sin + (position < 0 ? 0 : position < num_positions ? position : num_positions - 1) * rope_dim;
}

}  // namespace specdec::mla
