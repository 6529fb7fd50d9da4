// build_tree_from_mask: links, mask and positions of a tree that comes from elsewhere as an ancestor mask.
#pragma once

#include <bit>

#include "core/dispatch.h"
#include "core/slots.h"
#include "tree/tree_rows.h"

namespace specdec {

struct BuildTreeFromMaskParams {
  const int32_t* tokens;     // [batch, nodes]
  const int64_t* mask;       // [batch, nodes, words], 64-bit patterns
  const int32_t* seq_lens;   // [num_slots]
  const int32_t* num_nodes;  // [batch] or null: all of them
  const int32_t* slots;      // [batch] or null
  int32_t* status;           // [num_slots] or null
  TreeOut out;
  int64_t batch, num_slots;
};

// Word w of a mask with every bit below `bit` set.
SD_HD uint64_t bits_below(int64_t bit, int64_t w) {
  const int64_t in_word = bit - w * 64;
  return in_word >= 64 ? ~uint64_t{0} : in_word <= 0 ? 0 : (uint64_t{1} << in_word) - 1;
}

SD_HD int highest_bit(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return 63 - __clzll(static_cast<long long>(bits));
#else
  return 63 - std::countl_zero(bits);
#endif
}

constexpr int32_t kNoParent = -2;

// The parent that row i of a request's mask names (its highest bit below i, -1 for node 0), or kNoParent for a row
// that is not its parent's row and its own bit. If no row up to i is refused, they are a tree: row 0 has bit 0, so by
// induction each row has it and is closed under ancestors.
SD_HD int32_t parent_in_mask(const int64_t* mask, int64_t words, int32_t i) {
  int64_t parent = -1;
  for (int64_t w = 0; w < words; ++w) {
    const auto bits = static_cast<uint64_t>(mask[i * words + w]);
    const uint64_t own = own_bit(i, w), below = bits & bits_below(i, w);
    if ((bits & ~below) != own) return kNoParent;
    if (below != 0) parent = w * 64 + highest_bit(below);
  }
  if (i == 0) return -1;
  if (parent < 0) return kNoParent;
  for (int64_t w = 0; w < words; ++w)
    if (static_cast<uint64_t>(mask[i * words + w]) != (static_cast<uint64_t>(mask[parent * words + w]) | own_bit(i, w)))
      return kNoParent;
  return static_cast<int32_t>(parent);
}

void build_tree_from_mask(CallStream stream, const TensorView& tokens, const TensorView& mask,
                          const TensorView& seq_lens, const OptTensor& num_nodes, const OptTensor& slots,
                          const OptTensor& status, const TensorView& out_tokens, const TensorView& out_parents,
                          const TensorView& out_positions, const TensorView& out_first_child,
                          const TensorView& out_next_sibling, const TensorView& out_mask,
                          const TensorView& out_num_nodes);

void build_tree_from_mask_cpu(const BuildTreeFromMaskParams& p);
void build_tree_from_mask_cuda(const BuildTreeFromMaskParams& p, Stream stream);

}  // namespace specdec
