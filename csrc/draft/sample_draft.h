// sample_draft: draw k tokens without replacement from each row of draft logits, in draw order (gumbel.h).
#pragma once

#include "core/dispatch.h"
#include "core/slots.h"
#include "draft/gumbel.h"

namespace specdec::draft {

struct SampleDraftParams {
  const void* logits;  // [rows, vocab], float dtype, rows `logits_stride` elements apart
  Dtypes logits_dtype;
  int64_t logits_stride;
  const int32_t* positions;  // [rows], of the drawn tokens
  const int64_t* seeds;      // [num_slots]
  const float* temperature;  // [num_slots]
  const int32_t* slots;      // [batch] or null
  const int32_t* id_map;     // [vocab] or null: draft id -> target id
  int32_t* out_ids;          // [rows, k]
  float* out_logprobs;       // [rows, k], <= 0
  int64_t rows, rows_per_request, vocab, k, num_slots;
};

// Sampling state of one row.
struct DraftRow {
  int64_t slot;  // -1: an empty row
  float scale;   // log2(e) / temperature; 0: greedy
  uint64_t seed;
  uint32_t position, branch;  // `branch` distinguishes the rows of a request

  // Return the words for ids 4 * block to 4 * block + 3.
  SD_HD Noise noise_of(uint32_t block) const { return noise(seed, NoiseUse::kDraft, position, branch, block); }
};

// Return the state of row `branch` of request b.
SD_HD DraftRow draft_row(const SampleDraftParams& p, int64_t b, int64_t branch) {
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  if (slot < 0) return {-1, 0, 0, 0, 0};
  return {slot, scale_of_temperature(p.temperature[slot]), static_cast<uint64_t>(p.seeds[slot]),
          static_cast<uint32_t>(p.positions[b * p.rows_per_request + branch]), static_cast<uint32_t>(branch)};
}

void sample_draft(CallStream stream, const TensorView& logits, int64_t k, const TensorView& seeds,
                  const TensorView& positions, const TensorView& temperature, const OptTensor& slots,
                  const OptTensor& id_map, const TensorView& out_ids, const TensorView& out_logprobs);

void sample_draft_cpu(const SampleDraftParams& p);
void sample_draft_cuda(const SampleDraftParams& p, Stream stream);

}  // namespace specdec::draft
