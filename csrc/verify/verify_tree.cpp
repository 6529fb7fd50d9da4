// verify_tree: argument checks, planning and the CPU implementation.
#include "verify/verify_tree.h"

#include <limits>

#include "core/bytes.h"
#include "verify/token_weights.h"

namespace specdec::verify {
namespace {

// Collect the sizes that a plan depends on.
VerifyShape shape_of(const TensorView& logits, int64_t batch, int64_t num_nodes, bool sampled, bool rejects) {
  const bool packed = logits.ndim() == 2;
  return {.batch = batch,
          .num_nodes = num_nodes,
          .rows = packed ? logits.shape(0) : batch * num_nodes,
          .vocab = logits.shape(packed ? 1 : 2),
          .logit_bytes = item_bytes(logits),
          .sampled = sampled,
          .rejects = rejects};
}

VerifyPlan plan_call(const Check& check, const VerifyShape& shape, const std::optional<std::string>& name) {
  if (check.on_cuda()) return plan_verify(check, shape, device_of(check), name);
  check.that(!name, "plan", {"is ", name.value_or("")}, "None on cpu");
  return {};
}

// Check the arguments that a plan depends on.
VerifyShape check_planned(Check& check, const TensorView& logits, std::optional<int64_t> num_nodes,
                          const OptTensor& temperature, const OptTensor& draft_logits) {
  Dim B{"batch"}, N{"num_nodes", num_nodes.value_or(-1)}, V{"vocab"};
  if (num_nodes) {
    check.range("num_nodes", N, 1, kMaxVerifiedNodes);
    check.strided("logits", logits, {B, V}, kFloats);  // packed rows are at least as many as the requests
  } else {
    check.strided("logits", logits, {B, N, V}, kFloats);
  }
  return shape_of(logits, B, N, temperature.has_value(), draft_logits.has_value());
}

}  // namespace

void verify_tree(CallStream stream, const TensorView& logits, const TensorView& tokens, const TensorView& parents,
                 const TensorView& positions, const TensorView& first_child, const TensorView& next_sibling,
                 const TensorView& num_nodes, int64_t accept_width, const OptTensor& slots,
                 const OptTensor& cu_seqlens_q, const OptTensor& temperature, const OptTensor& top_k,
                 const OptTensor& top_p, const OptTensor& min_p, const OptTensor& seeds, const OptTensor& vocab_mask,
                 const OptTensor& logit_bias, const OptTensor& draft_logits, const OptTensor& draft_rows,
                 const OptTensor& draft_temperature, const OptTensor& id_map, bool block_verification,
                 const std::optional<std::string>& plan, const OptTensor& workspace, const OptTensor& status,
                 const TensorView& out_tokens, const TensorView& out_len, const TensorView& out_path) {
  Check check("verify_tree");
  Dim B{"batch"}, N{"num_nodes"}, V{"vocab"}, S{"accept_width", accept_width}, R{"num_slots"};
  Dim T{"rows"};
  const bool packed = cu_seqlens_q.has_value();
  if (packed)
    check.strided("logits", logits, {T, V}, kFloats);
  else
    check.strided("logits", logits, {B, N, V}, kFloats);
  check.packed("cu_seqlens_q", cu_seqlens_q, B);
  if (packed) check.range("rows", T, B > 0 ? 1 : 0, INT32_MAX);
  check.range("vocab", V, 1, kMaxVocab);
  check.tensor("tree.tokens", tokens, {B, N}, kInt32);
  check.range("num_nodes", N, 1, kMaxVerifiedNodes);
  check.tensor("tree.parents", parents, {B, N}, kInt32);
  check.tensor("tree.positions", positions, {B, N}, kInt32);
  check.tensor("tree.first_child", first_child, {B, N}, kInt32);
  check.tensor("tree.next_sibling", next_sibling, {B, N}, kInt32);
  check.tensor("tree.num_nodes", num_nodes, {B}, kInt32);
  check.range("accept_width", accept_width, 1, std::numeric_limits<int32_t>::max());
  check.tensor("temperature", temperature, {R}, kFloat32);
  if (temperature) check.that(seeds.has_value(), "seeds", "is None", "a tensor, since temperature is given");
  for (const auto& [name, given] : {std::pair{"top_k", top_k.has_value()},
                                    {"top_p", top_p.has_value()},
                                    {"min_p", min_p.has_value()},
                                    {"seeds", seeds.has_value()}})
    check.that(!given || temperature, name, "is given", "None, since temperature is None");
  check.tensor("top_k", top_k, {R}, kInt32);
  check.tensor("top_p", top_p, {R}, kFloat32);
  check.tensor("min_p", min_p, {R}, kFloat32);
  check.tensor("seeds", seeds, {R}, kInt64);
  const int64_t mask_words = (V + 31) / 32;
  if (packed)
    check.tensor("vocab_mask", vocab_mask, {T, mask_words}, kInt32);
  else
    check.tensor("vocab_mask", vocab_mask, {B, N, mask_words}, kInt32);
  if (logit_bias) check.strided("logit_bias", *logit_bias, {R, V}, kFloat32);
  Dim rows{"num_rows"}, Vd{"draft_vocab"};
  if (draft_logits) {
    check.that(temperature.has_value(), "draft_logits", "is given", "None, since temperature is None");
    check.strided("draft_logits", *draft_logits, {B, rows, id_map ? Vd : V}, dtype_of(logits));
    check.that(rows >= 1 && rows <= INT32_MAX, "draft_logits", {"has ", rows, " rows"}, {"1 to ", INT32_MAX});
    check.that(draft_rows.has_value(), "draft_rows", "is None", "a tensor, since draft_logits is given");
    if (id_map) check.range("draft_vocab", Vd, 1, kMaxMappedVocab);
    check.that(!id_map || V <= kMaxMappedVocab, "vocab", {"is ", V}, "at most 1048576 with an id_map");
  }
  for (const auto& [name, given] : {std::pair{"draft_rows", draft_rows.has_value()},
                                    {"draft_temperature", draft_temperature.has_value()},
                                    {"id_map", id_map.has_value()}})
    check.that(!given || draft_logits, name, "is given", "None, since draft_logits is None");
  check.that(!block_verification || draft_logits, "block_verification", "is True", "False, since draft_logits is None");
  check.tensor("draft_rows", draft_rows, {B, N}, kInt32);
  check.tensor("draft_temperature", draft_temperature, {R}, kFloat32);
  check.tensor("id_map", id_map, {Vd}, kInt32);
  const VerifyShape shape = shape_of(logits, B, N, temperature.has_value(), draft_logits.has_value());
  const VerifyPlan planned = plan_call(check, shape, plan);
  void* const own_memory = check.workspace(workspace, planned.workspace_bytes(shape));
  check.output("status", status, {R}, kInt32);
  const bool has_slots = R.value >= 0;
  if (has_slots)
    check.slots(slots, B, R);
  else
    check.tensor("slots", slots, {B}, kInt32);
  check.output("out.tokens", out_tokens, {B, S}, kInt32);
  check.output("out.num_valid", out_len, {B}, kInt32);
  check.output("out.path", out_path, {B, S}, kInt32);
  if (B == 0) return;

  const VerifyTreeParams params{
      .logits = logits.data<void>(),
      .logits_dtype = dtype_of(logits),
      .logits_batch_stride = packed ? 0 : logits.stride(0),
      .logits_node_stride = logits.stride(packed ? 0 : 1),
      .links = {.tokens = tokens.data<int32_t>(),
                .parents = parents.data<int32_t>(),
                .first_child = first_child.data<int32_t>(),
                .next_sibling = next_sibling.data<int32_t>(),
                .num_nodes = N},
      .positions = positions.data<int32_t>(),
      .tree_sizes = num_nodes.data<int32_t>(),
      .sampling = {.temperature = data_or_null<const float>(temperature),
                   .top_k = data_or_null<const int32_t>(top_k),
                   .top_p = data_or_null<const float>(top_p),
                   .min_p = data_or_null<const float>(min_p),
                   .seeds = data_or_null<const int64_t>(seeds)},
      .drafts = {.logits = data_or_null<const void>(draft_logits),
                 .batch_stride = draft_logits ? draft_logits->stride(0) : 0,
                 .row_stride = draft_logits ? draft_logits->stride(1) : 0,
                 .num_rows = draft_logits ? rows.value : 0,
                 .vocab = draft_logits ? draft_logits->shape(2) : 0,
                 .rows = data_or_null<const int32_t>(draft_rows),
                 .temperature = data_or_null<const float>(draft_temperature),
                 .id_map = data_or_null<const int32_t>(id_map),
                 .block_verification = block_verification},
      .vocab_mask = data_or_null<const int32_t>(vocab_mask),
      .logit_bias = data_or_null<const float>(logit_bias),
      .bias_stride = logit_bias ? logit_bias->stride(0) : 0,
      .mask_words = mask_words,
      .slots = data_or_null<const int32_t>(slots),
      .cu_seqlens_q = data_or_null<const int32_t>(cu_seqlens_q),
      .status = data_or_null<int32_t>(status),
      .out_tokens = out_tokens.data<int32_t>(),
      .out_len = out_len.data<int32_t>(),
      .out_path = out_path.data<int32_t>(),
      .batch = B,
      .vocab = V,
      .accept_width = S,
      .num_rows = shape.rows,
      // Without slot state only the sign of slots[b] matters.
      .num_slots = has_slots ? R.value : std::numeric_limits<int64_t>::max(),
      .workspace = static_cast<uint64_t*>(own_memory),
      .plan = planned,
  };
  SD_DISPATCH(check, stream, verify_tree, params);
}

int64_t verify_tree_workspace(const TensorView& logits, std::optional<int64_t> num_nodes, const OptTensor& temperature,
                              const OptTensor& draft_logits, const std::optional<std::string>& plan) {
  Check check("verify_tree");
  const VerifyShape shape = check_planned(check, logits, num_nodes, temperature, draft_logits);
  return plan_call(check, shape, plan).workspace_bytes(shape);
}

std::string verify_tree_plan(const TensorView& logits, std::optional<int64_t> num_nodes, const OptTensor& temperature,
                             const OptTensor& draft_logits, const std::optional<std::string>& plan) {
  Check check("verify_tree");
  const VerifyShape shape = check_planned(check, logits, num_nodes, temperature, draft_logits);
  const VerifyPlan planned = plan_call(check, shape, plan);
  return check.on_cuda() ? planned.name() : "cpu";
}

void verify_tree_cpu(const VerifyTreeParams& p) {
  if (p.drafts.logits) return verify_sampled_cpu(p);
  with_float_type(p.logits_dtype, [&]<class T>() {
    TokenWeights weights;
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t slot = slot_of(p.slots, b, p.num_slots);
      const auto nodes = [&](int64_t i) { return read_node(p.links, b, i); };
      EmittedRow out = emitted_row(p, b);
      int32_t bits = 0;
      const int32_t size = slot < 0 ? 0 : walked_size(p, b, bits);
      const Sampler sampler = size > 0 ? sampler_of(p.sampling, slot, p.vocab) : Sampler{};

      for (int32_t node = size > 0 ? 0 : kNoChild; node >= 0;) {
        const LogitRow<T> row = logit_row<T>(p, b, slot, node);
        const int32_t token =
            sampler.greedy ? largest_id(row, p.vocab) : weights.draw(row, p.vocab, sampler, position_after(p, b, node));
        if (token < 0) bits |= kBadLogits;
        if (token < 0 || !out.emit(token, node)) break;
        node = find_child(nodes, size, node, first_child(nodes, size, node), token);
        if (node == kMalformed) bits |= kBadTree;
      }
      finish_walk(p, b, slot, bits, out);
    }
  });
}

}  // namespace specdec::verify
