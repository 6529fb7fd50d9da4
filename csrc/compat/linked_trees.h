// build_tree_kernel_efficient: SGLang's tree builder for chosen candidates, with 64-bit links between flat rows.
// docs/integrations/sglang.md lists the differences from SGLang's.
#pragma once

#include "core/dispatch.h"
#include "core/host_device.h"

namespace specdec::compat {

constexpr int64_t kMaxLinkedNodes = 256;
constexpr int64_t kMaxLinkedBatch = int64_t{1} << 22;  // so that no offset into a mask overflows 64 bits

// Outputs; every element is written.
struct LinkedTrees {
  int64_t* positions;       // [batch * nodes]
  int64_t* retrieve_index;  // [batch, nodes]: b * nodes + node
  int64_t* next_token;      // [batch, nodes]: the first child, -1: none
  int64_t* next_sibling;    // [batch, nodes]: -1: none
  const int64_t* seq_lens;  // [batch]
  int64_t batch, nodes;

  SD_HD void write(int64_t b, int64_t i, int64_t depth, int64_t child, int64_t sibling) const {
    const int64_t at = b * nodes + i;
    positions[at] = static_cast<int64_t>(static_cast<uint64_t>(seq_lens[b]) + static_cast<uint64_t>(depth));
    retrieve_index[at] = at;
    next_token[at] = child;
    next_sibling[at] = sibling;
  }
};

enum MaskLayout : int64_t {
  kFullMaskRows = 0,   // bytes: each node's prefix, which is not written, then the tree's columns
  kTreeMaskRows = 1,   // bytes: only the tree's columns
  kPackedMaskRows = 2  // bits of the tree's columns; 1, 2 or 4 bytes per node
};

struct BuildTreeKernelEfficientParams {
  LinkedTrees out;
  const int64_t* parent_list;     // [batch, parent_columns]
  const int64_t* selected_index;  // [batch, nodes - 1]
  uint8_t* mask;                  // [mask_bytes]
  int64_t parent_columns, mask_bytes, topk, layout;

  // Return the candidate that is the parent of `candidate`; -1: the root, -2: none.
  SD_HD int64_t parent_candidate(int64_t b, int64_t candidate) const {
    const int64_t group = candidate / topk;
    if (candidate < 0 || group >= parent_columns) return candidate >= 0 && group == 0 ? -1 : -2;
    if (group == 0) return -1;
    const int64_t parent = parent_list[b * parent_columns + group];
    return parent < 0 ? -2 : parent;
  }

  // Return the bytes of a node's packed bits.
  SD_HD int64_t packed_bytes() const { return out.nodes <= 8 ? 1 : out.nodes <= 16 ? 2 : 4; }

  // Where node i's tree columns begin, `prefixes` being the sum of the rows' prefixes before row b; -1 where they would
  // not all be within the mask.
  SD_HD int64_t mask_row(int64_t b, int64_t i, int64_t prefixes, int64_t prefix) const {
    const int64_t n = out.nodes, row = b * n + i;
    int64_t at = row * n, size = n;
    if (layout == kPackedMaskRows) size = packed_bytes(), at = row * size;
    if (layout == kFullMaskRows) at += n * prefixes + (i + 1) * prefix;
    return at >= 0 && at <= mask_bytes - size ? at : -1;
  }
};

SD_HD int64_t prefix_of(const LinkedTrees& out, int64_t b) { return clamp_to(out.seq_lens[b], 0, INT32_MAX); }

void build_tree_kernel_efficient(CallStream stream, const TensorView& parent_list, const TensorView& selected_index,
                                 const TensorView& verified_seq_len, const TensorView& tree_mask,
                                 const TensorView& positions, const TensorView& retrive_index,
                                 const TensorView& retrive_next_token, const TensorView& retrive_next_sibling,
                                 int64_t topk, int64_t depth, int64_t draft_token_num, int64_t tree_mask_mode);
void build_tree_kernel_efficient_cpu(const BuildTreeKernelEfficientParams& p);
void build_tree_kernel_efficient_cuda(const BuildTreeKernelEfficientParams& p, Stream stream);

}  // namespace specdec::compat
