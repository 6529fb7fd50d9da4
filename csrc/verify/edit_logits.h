// edit_logits: apply each request's logit bias, penalties and grammar mask to its nodes' logits, in place.
//
// Penalties at a node count the tokens of the text and of the drafted path from the root to the node.
#pragma once

#include "core/bits.h"
#include "core/dispatch.h"
#include "core/exact_math.h"
#include "core/floats.h"
#include "verify/node_logits.h"

namespace specdec::verify {

// Edits of a slot; Python's `Edit` mirrors these bits.
enum EditBit : int32_t { kEditBias = 1, kEditPenalties = 2, kEditMask = 4 };

// The kernel counts (token, node) pairs in 32 bits.
constexpr int64_t kMaxEditedNodes = int64_t{1} << 20;

struct EditLogitsParams {
  NodeLogits logits;
  const int64_t* mask;     // [batch, num_nodes, words] or packed [num_rows, words]: bits of each node and its ancestors
  const int32_t* tokens;   // [batch, tree_nodes]
  const int32_t* kinds;    // [num_slots], EditBits
  const float* bias;       // [num_slots, vocab]
  const int32_t* counts;   // [num_slots, vocab]: 2 * times generated + (1 if in the prompt)
  const float* presence;   // [num_slots]
  const float* frequency;  // [num_slots]
  const float* repetition;    // [num_slots]
  const int32_t* vocab_mask;  // as logits, [.., vocab_words], or null: bitmask of the tokens allowed at each node
  int64_t words, tree_nodes, vocab_words;
};

void edit_logits(CallStream stream, const TensorView& logits, const TensorView& mask, const TensorView& tokens,
                 const TensorView& kinds, const TensorView& bias, const TensorView& counts, const TensorView& presence,
                 const TensorView& frequency, const TensorView& repetition, const OptTensor& vocab_mask,
                 const OptTensor& slots, const OptTensor& cu_seqlens_q);

void edit_logits_cpu(const EditLogitsParams& p);
void edit_logits_cuda(const EditLogitsParams& p, Stream stream);

// Edits of one request, and its rows.
struct EditedRequest {
  int64_t b, slot;
  int32_t kinds;  // 0: nothing
  RowRange nodes;
  float presence, frequency, repetition;
};

SD_HD EditedRequest edited_request(const EditLogitsParams& p, int64_t b) {
  const int64_t slot = p.logits.slot(b);
  int32_t kinds = slot < 0 ? 0 : p.kinds[slot];
  if (p.vocab_mask == nullptr) kinds &= ~kEditMask;
  if (kinds == 0) return {b, slot, 0, {}, 0, 0, 1};
  return {b, slot, kinds, p.logits.nodes(b), p.presence[slot], p.frequency[slot], p.repetition[slot]};
}

// Return whether bias or penalties change the logit of token v at nodes where it is not drafted.
SD_HD bool is_edited(const EditLogitsParams& p, const EditedRequest& r, int64_t v) {
  const int64_t at = r.slot * p.logits.vocab + v;
  return ((r.kinds & kEditBias) && p.bias[at] != 0) || ((r.kinds & kEditPenalties) && p.counts[at] != 0);
}

// Count how often token v occurs on the path to a node, the root excluded: `counts` has it already.
SD_HD int32_t times_drafted(const EditLogitsParams& p, const EditedRequest& r, int64_t node, int32_t v) {
  const int64_t* mask = p.mask + (r.nodes.first + node) * p.words;
  int32_t times = 0;
  for (int64_t w = 0; w < p.words; ++w) {
    auto bits = static_cast<uint64_t>(mask[w]);
    if (w == 0) bits &= ~uint64_t{1};
    while (bits != 0) {
      const int64_t bit = highest_bit(bits), i = 64 * w + bit;
      bits &= low_bits(bit);
      times += i < p.tree_nodes && p.tokens[r.b * p.tree_nodes + i] == v;
    }
  }
  return times;
}

// Return the logit of token v at a node after bias and penalties.
SD_HD float edited(const EditLogitsParams& p, const EditedRequest& r, int64_t node, int64_t v, float x) {
  const int64_t at = r.slot * p.logits.vocab + v;
  if (r.kinds & kEditBias) x = add(x, p.bias[at]);
  if (!(r.kinds & kEditPenalties)) return x;
  const int32_t count = p.counts[at], drafted = times_drafted(p, r, node, static_cast<int32_t>(v));
  const int32_t generated = (count >> 1) + drafted;
  if (count != 0 || drafted > 0) x = x > 0 ? div(x, r.repetition) : mul(x, r.repetition);
  if (generated > 0) x = sub(sub(x, mul(r.frequency, static_cast<float>(generated))), r.presence);
  return x;
}

template <class T>
SD_HD void edit_logit(const EditLogitsParams& p, const EditedRequest& r, int64_t node, int64_t v) {
  T& logit = p.logits.row<T>(r.b, r.nodes, node)[v];
  logit = from_float<T>(edited(p, r, node, v, to_float(logit)));
}

// Return the tokens 32 w to 32 w + 31 that the grammar forbids at a node, as bits.
SD_HD uint32_t forbidden(const EditLogitsParams& p, const EditedRequest& r, int64_t node, int64_t w) {
  return ~static_cast<uint32_t>(p.vocab_mask[(r.nodes.first + node) * p.vocab_words + w]);
}

}  // namespace specdec::verify
