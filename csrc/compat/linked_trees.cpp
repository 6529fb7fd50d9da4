// build_tree_kernel_efficient: argument checks and the CPU implementation.
#include "compat/linked_trees.h"

#include <algorithm>
#include <limits>

namespace specdec::compat {
namespace {

// Return the elements of a writable mask of bytes (bool or 8-bit integers) of any shape.
uint8_t* mask_bytes(Check& check, const TensorView& mask) {
  const DLDataType type = mask.dl.dtype;
  const bool bytes =
      type.bits == 8 && type.lanes == 1 && (type.code == kDLBool || type.code == kDLUInt || type.code == kDLInt);
  check.that(bytes, "tree_mask", {"is ", type}, "bool or uint8");
  int64_t stride = 1;
  for (int64_t i = mask.ndim() - 1; i >= 0; --i) {
    const bool follows = mask.shape(static_cast<int>(i)) == 1 || mask.stride(static_cast<int>(i)) == stride;
    check.that(follows || mask.numel() == 0, "tree_mask", "is not contiguous", "a contiguous tensor");
    stride *= mask.shape(static_cast<int>(i));
  }
  const DLDevice device = mask.dl.device, first = check.device();
  const bool here = check.on_cuda() ? device.device_type == kDLCUDA && device.device_id == first.device_id
                                    : device.device_type != kDLCUDA;
  check.that(here, "tree_mask", "is on another device", {"that of ", check.first_name()});
  check.that(!mask.read_only, "tree_mask", "is read-only", "a writable tensor");
  check.that(mask.dl.data != nullptr || mask.numel() == 0, "tree_mask", "has no storage (a fake tensor?)",
             "a tensor with data");
  return mask.data<uint8_t>();
}

// Check the outputs and lengths.
LinkedTrees check_linked(Check& check, Dim& batch, Dim& nodes, const TensorView& seq_lens, const TensorView& positions,
                         const TensorView& retrieve_index, const TensorView& next_token,
                         const TensorView& next_sibling) {
  check.tensor("verified_seq_len", seq_lens, {batch}, kInt64);
  check.range("batch", batch, 0, kMaxLinkedBatch);
  check.range("draft_token_num", nodes, 1, kMaxLinkedNodes);
  check.output("retrive_index", retrieve_index, {batch, nodes}, kInt64);
  check.output("retrive_next_token", next_token, {batch, nodes}, kInt64);
  check.output("retrive_next_sibling", next_sibling, {batch, nodes}, kInt64);
  if (positions.ndim() == 2)
    check.output("positions", positions, {batch, nodes}, kInt64);
  else
    check.output("positions", positions, {batch * nodes}, kInt64);
  return {.positions = positions.data<int64_t>(),
          .retrieve_index = retrieve_index.data<int64_t>(),
          .next_token = next_token.data<int64_t>(),
          .next_sibling = next_sibling.data<int64_t>(),
          .seq_lens = seq_lens.data<const int64_t>(),
          .batch = batch,
          .nodes = nodes};
}

}  // namespace

void build_tree_kernel_efficient(CallStream stream, const TensorView& parent_list, const TensorView& selected_index,
                                 const TensorView& verified_seq_len, const TensorView& tree_mask,
                                 const TensorView& positions, const TensorView& retrive_index,
                                 const TensorView& retrive_next_token, const TensorView& retrive_next_sibling,
                                 int64_t topk, int64_t depth, int64_t draft_token_num, int64_t tree_mask_mode) {
  Check check("build_tree_kernel_efficient");
  Dim B{"batch"}, D{"draft_token_num", draft_token_num}, P{"parents"};
  check.range("topk", topk, 1, std::numeric_limits<int32_t>::max());
  check.range("depth", depth, 1, std::numeric_limits<int32_t>::max());
  check.range("tree_mask_mode", tree_mask_mode, kFullMaskRows, kPackedMaskRows);
  const LinkedTrees out =
      check_linked(check, B, D, verified_seq_len, positions, retrive_index, retrive_next_token, retrive_next_sibling);
  check.tensor("parent_list", parent_list, {B, P}, kInt64);
  if (depth > 1) check.range("parent_list.shape[1]", P, topk * (depth - 1) + 1, std::numeric_limits<int64_t>::max());
  check.tensor("selected_index", selected_index, {B, D - 1}, kInt64);
  uint8_t* mask = mask_bytes(check, tree_mask);
  check.that(tree_mask_mode != kPackedMaskRows || D <= 32, "draft_token_num", {"is ", D},
             "at most 32 for packed masks");
  if (B == 0) return;

  const BuildTreeKernelEfficientParams params{.out = out,
                                              .parent_list = parent_list.data<const int64_t>(),
                                              .selected_index = selected_index.data<const int64_t>(),
                                              .mask = mask,
                                              .parent_columns = P,
                                              .mask_bytes = tree_mask.numel(),
                                              .topk = topk,
                                              .layout = tree_mask_mode};
  if (tree_mask_mode != kFullMaskRows) {  // only the device knows the size of a full mask
    const int64_t row = tree_mask_mode == kTreeMaskRows ? D.value : params.packed_bytes();
    check.that(tree_mask.numel() >= B * D * row, "tree_mask", {"has ", tree_mask.numel(), " bytes"},
               {"at least ", B * D * row});
  }
  SD_DISPATCH(check, stream, build_tree_kernel_efficient, params);
}

void build_tree_kernel_efficient_cpu(const BuildTreeKernelEfficientParams& p) {
  const int64_t n = p.out.nodes;
  int64_t prefixes = 0;
  for (int64_t b = 0; b < p.out.batch; ++b) {
    const int64_t* selected = p.selected_index + b * (n - 1);
    int64_t parents[kMaxLinkedNodes], depths[kMaxLinkedNodes] = {}, children[kMaxLinkedNodes],
                                      siblings[kMaxLinkedNodes];
    bool sees[kMaxLinkedNodes][kMaxLinkedNodes];
    for (int64_t i = 0; i < n; ++i) {
      const int64_t candidate = i > 0 ? p.parent_candidate(b, selected[i - 1]) : -2;
      parents[i] = candidate == -1 ? 0 : -1;
      for (int64_t j = 1; candidate >= 0 && j < i && parents[i] < 0; ++j)
        if (selected[j - 1] == candidate) parents[i] = j;
      children[i] = siblings[i] = -1;
      depths[i] = parents[i] < 0 ? 0 : depths[parents[i]] + 1;
      std::fill_n(sees[i], n, false);
      if (parents[i] >= 0) std::copy_n(sees[parents[i]], n, sees[i]);
      sees[i][0] = sees[i][i] = true;
    }
    for (int64_t i = n - 1; i > 0; --i) {
      if (parents[i] < 0) continue;
      siblings[i] = children[parents[i]];
      children[parents[i]] = i;
    }
    const int64_t prefix = prefix_of(p.out, b);
    for (int64_t i = 0; i < n; ++i) {
      p.out.write(b, i, depths[i], children[i], siblings[i]);
      const int64_t at = p.mask_row(b, i, prefixes, prefix);
      if (at < 0) continue;
      if (p.layout == kPackedMaskRows) std::fill_n(p.mask + at, p.packed_bytes(), uint8_t{0});
      for (int64_t j = 0; j < n; ++j) {
        if (p.layout == kPackedMaskRows)
          p.mask[at + j / 8] |= static_cast<uint8_t>(sees[i][j] << j % 8);
        else
          p.mask[at + j] = sees[i][j];
      }
    }
    prefixes += prefix;
  }
}

}  // namespace specdec::compat
