// expand_root and expand_tree: argument checks and the CPU implementations.
#include "draft/expand_tree.h"

#include "core/best_list.h"
#include "draft/select_topk.h"

namespace specdec::draft {
namespace {

// Depth and offset are added to a length: both are small enough that only an invalid length can overflow int32.
constexpr int64_t kMaxPositionOffset = 1 << 20;

// Check the offset of positions and the calibration table; bind `depths`.
void check_depth_arguments(Check& check, int64_t position_offset, const OptTensor& calibration, Dim& depths) {
  check.range("position_offset", position_offset, -kMaxPositionOffset, kMaxPositionOffset);
  check.tensor("calibration", calibration, {depths, 2}, kFloat32);
  if (calibration) check.range("num_depths", depths, 1, kMaxCalibratedDepths);
}

}  // namespace

void expand_root(CallStream stream, const TensorView& topk_ids, const TensorView& topk_logprobs,
                 const TensorView& seq_lens, int64_t num_steps, const OptTensor& slots, int64_t position_offset,
                 const OptTensor& calibration, const TensorView& out_cand_tokens, const TensorView& out_cand_parents,
                 const TensorView& out_cand_scores, const TensorView& out_frontier, const TensorView& out_tokens,
                 const TensorView& out_positions, const TensorView& out_mask) {
  Check check("expand_root");
  Dim S{"num_slots"}, K{"k"}, B{"batch"};
  check.tensor("topk_ids", topk_ids, {S, K}, kInt32);
  check.range("k", K, 1, kMaxTopk);
  check.tensor("topk_logprobs", topk_logprobs, {S, K}, kFloat32);
  check.tensor("seq_lens", seq_lens, {S}, kInt32);
  check.range("num_steps", num_steps, 1, kMaxSteps);
  Dim C{"candidates", num_candidates(K, num_steps)}, W{"mask_words", draft_mask_words(K, num_steps)};
  if (!slots) B.value = S;
  check.slots(slots, B, S);
  Dim depths{"num_depths"};
  check_depth_arguments(check, position_offset, calibration, depths);
  check.output("out[0].tokens", out_cand_tokens, {B, C}, kInt32);
  check.output("out[0].parents", out_cand_parents, {B, C}, kInt32);
  check.output("out[0].scores", out_cand_scores, {B, C}, kFloat32);
  check.output("out[1].nodes", out_frontier, {B, K}, kInt32);
  check.output("out[1].tokens", out_tokens, {B, K}, kInt32);
  check.output("out[1].positions", out_positions, {B, K}, kInt32);
  check.output("out[1].mask", out_mask, {B, K, W}, kInt64);
  if (B == 0) return;

  const ExpandRootParams params{
      .topk_ids = topk_ids.data<const int32_t>(),
      .topk_logprobs = topk_logprobs.data<const float>(),
      .seq_lens = seq_lens.data<const int32_t>(),
      .slots = data_or_null<const int32_t>(slots),
      .calibration = data_or_null<const float>(calibration),
      .out_cand_tokens = out_cand_tokens.data<int32_t>(),
      .out_cand_parents = out_cand_parents.data<int32_t>(),
      .out_cand_scores = out_cand_scores.data<float>(),
      .out_frontier = out_frontier.data<int32_t>(),
      .out_tokens = out_tokens.data<int32_t>(),
      .out_positions = out_positions.data<int32_t>(),
      .out_mask = out_mask.data<int64_t>(),
      .batch = B,
      .num_slots = S,
      .k = K,
      .candidates = C,
      .mask_words = W,
      .position_offset = position_offset,
      .depths = depths,
  };
  SD_DISPATCH(check, stream, expand_root, params);
}

void expand_root_cpu(const ExpandRootParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t slot = slot_of(p.slots, b, p.num_slots);
    for (int64_t c = 0; c < p.candidates; ++c) write_root_candidate(p, b, slot, c);
    for (int64_t j = 0; j < p.k; ++j) write_root_frontier(p, b, slot, j);
  }
}

void expand_tree(CallStream stream, const TensorView& topk_ids, const TensorView& topk_logprobs, int64_t step,
                 const TensorView& cand_tokens, const TensorView& cand_parents, const TensorView& cand_scores,
                 const TensorView& frontier, const TensorView& mask, const TensorView& seq_lens, const OptTensor& slots,
                 int64_t position_offset, const OptTensor& calibration, const TensorView& out_tokens,
                 const TensorView& out_parent_rows, const TensorView& out_positions) {
  Check check("expand_tree");
  Dim B{"batch"}, K{"k"}, C{"candidates"}, S{"num_slots"};
  check.tensor("topk_ids", topk_ids, {B, K, K}, kInt32);
  check.range("k", K, 1, kMaxTopk);
  check.tensor("topk_logprobs", topk_logprobs, {B, K, K}, kFloat32);
  check.output("candidates.tokens", cand_tokens, {B, C}, kInt32);
  check.that(C >= K && (C - K) % (K * K) == 0, "candidates.tokens", {"has ", C, " candidates"},
             {"k + (num_steps - 1) * k * k with k=", K});
  const int64_t num_steps = 1 + (C - K) / (K * K);
  check.range("num_steps", num_steps, 1, kMaxSteps);
  check.range("step", step, 2, num_steps);
  Dim W{"mask_words", draft_mask_words(K, num_steps)};
  check.output("candidates.parents", cand_parents, {B, C}, kInt32);
  check.output("candidates.scores", cand_scores, {B, C}, kFloat32);
  check.output("frontier.nodes", frontier, {B, K}, kInt32);
  check.output("frontier.mask", mask, {B, K, W}, kInt64);
  check.tensor("seq_lens", seq_lens, {S}, kInt32);
  check.slots(slots, B, S);
  Dim depths{"num_depths"};
  check_depth_arguments(check, position_offset, calibration, depths);
  check.output("out.tokens", out_tokens, {B, K}, kInt32);
  check.output("out.parent_rows", out_parent_rows, {B, K}, kInt32);
  check.output("out.positions", out_positions, {B, K}, kInt32);
  if (B == 0) return;

  const ExpandTreeParams params{
      .topk_ids = topk_ids.data<const int32_t>(),
      .topk_logprobs = topk_logprobs.data<const float>(),
      .cand_tokens = cand_tokens.data<int32_t>(),
      .cand_parents = cand_parents.data<int32_t>(),
      .cand_scores = cand_scores.data<float>(),
      .frontier = frontier.data<int32_t>(),
      .mask = mask.data<int64_t>(),
      .seq_lens = seq_lens.data<const int32_t>(),
      .slots = data_or_null<const int32_t>(slots),
      .calibration = data_or_null<const float>(calibration),
      .out_tokens = out_tokens.data<int32_t>(),
      .out_parent_rows = out_parent_rows.data<int32_t>(),
      .out_positions = out_positions.data<int32_t>(),
      .batch = B,
      .num_slots = S,
      .k = K,
      .candidates = C,
      .mask_words = W,
      .position_offset = position_offset,
      .step = step,
      .depths = depths,
  };
  SD_DISPATCH(check, stream, expand_tree, params);
}

void expand_tree_cpu(const ExpandTreeParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t slot = slot_of(p.slots, b, p.num_slots);
    BestList<kMaxTopk> best(static_cast<int>(p.k));
    for (int64_t j = 0; j < p.k; ++j) {
      const FrontierNode parent = read_frontier(p, b, slot, j);
      for (int64_t i = j * p.k; i < (j + 1) * p.k; ++i)
        best.offer(append_child(p, b, slot, parent, i, read_child(p, b, i)), static_cast<int32_t>(i));
    }
    const int32_t position = child_position(p, slot);
    for (int64_t j = 0; j < p.k; ++j) write_frontier(p, b, slot, j, best.ids()[j], position);

    int64_t* mask = p.mask + b * p.k * p.mask_words;
    for (int64_t w = 0; w < p.mask_words; ++w) {
      int64_t parents[kMaxTopk];
      for (int64_t j = 0; j < p.k; ++j) parents[j] = mask[best.ids()[j] / p.k * p.mask_words + w];
      for (int64_t j = 0; j < p.k; ++j)
        mask[j * p.mask_words + w] = parents[j] | static_cast<int64_t>(own_bit((p.step - 1) * p.k + j, w));
    }
  }
}

}  // namespace specdec::draft
