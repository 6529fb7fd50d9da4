#include "verify/verify_tree.h"

#include <limits>

#include "core/errors.h"
#include "core/floats.h"

namespace specdec {
namespace {

void refuse_sampling(const char* name, const OptTensor& argument) {
  if (argument)
    throw NotImplementedError(std::string("verify_tree: ") + name +
                              " is given, but only greedy verification exists, expected None");
}

// The lowest id with the largest logit, or -1 when none is above -inf (NaN counts as -inf).
template <class T>
int32_t argmax(const T* row, int64_t vocab) {
  float best = -std::numeric_limits<float>::infinity();
  int32_t id = -1;
  for (int64_t v = 0; v < vocab; ++v) {
    const float x = to_float(row[v]);
    if (x > best) {
      best = x;
      id = static_cast<int32_t>(v);
    }
  }
  return id;
}

}  // namespace

void verify_tree(CallStream stream, const TensorView& logits, const TensorView& tokens, const TensorView& parents,
                 const TensorView& first_child, const TensorView& next_sibling, const TensorView& num_nodes,
                 int64_t accept_width, const OptTensor& slots, const OptTensor& temperature, const OptTensor& top_k,
                 const OptTensor& top_p, const OptTensor& min_p, const OptTensor& seed, const OptTensor& draft_logits,
                 const OptTensor& draft_rows, const OptTensor& status, const TensorView& out_tokens,
                 const TensorView& out_len, const TensorView& out_path) {
  refuse_sampling("temperature", temperature);
  refuse_sampling("top_k", top_k);
  refuse_sampling("top_p", top_p);
  refuse_sampling("min_p", min_p);
  refuse_sampling("seed", seed);
  refuse_sampling("draft_logits", draft_logits);
  refuse_sampling("draft_rows", draft_rows);

  Check check("verify_tree");
  Dim B{"batch"}, N{"num_nodes"}, V{"vocab"}, S{"accept_width", accept_width}, R{"num_slots"};
  check.strided("logits", logits, {B, N, V}, kFloats);
  check.range("vocab", V, 1, std::numeric_limits<int32_t>::max());
  check.tensor("tokens", tokens, {B, N}, kInt32);
  check.range("tree width", N, 1, std::numeric_limits<int32_t>::max());
  check.tensor("parents", parents, {B, N}, kInt32);
  check.tensor("first_child", first_child, {B, N}, kInt32);
  check.tensor("next_sibling", next_sibling, {B, N}, kInt32);
  check.tensor("num_nodes", num_nodes, {B}, kInt32);
  check.range("accept_width", accept_width, 1, std::numeric_limits<int32_t>::max());
  check.output("status", status, {R}, kInt32);
  if (status)
    check.slots(slots, B, R);
  else
    check.tensor("slots", slots, {B}, kInt32);
  check.output("out_tokens", out_tokens, {B, S}, kInt32);
  check.output("out_len", out_len, {B}, kInt32);
  check.output("out_path", out_path, {B, S}, kInt32);
  if (B == 0) return;

  const VerifyTreeParams params{
      .logits = logits.data<void>(),
      .logits_dtype = dtype_of(logits),
      .logits_batch_stride = logits.stride(0),
      .logits_node_stride = logits.stride(1),
      .links = {.tokens = tokens.data<int32_t>(),
                .parents = parents.data<int32_t>(),
                .first_child = first_child.data<int32_t>(),
                .next_sibling = next_sibling.data<int32_t>(),
                .num_nodes = N},
      .tree_sizes = num_nodes.data<int32_t>(),
      .slots = data_or_null<const int32_t>(slots),
      .status = data_or_null<int32_t>(status),
      .out_tokens = out_tokens.data<int32_t>(),
      .out_len = out_len.data<int32_t>(),
      .out_path = out_path.data<int32_t>(),
      .batch = B,
      .vocab = V,
      .accept_width = S,
      // Without slot state only the sign of slots[b] says anything.
      .num_slots = status ? R.value : std::numeric_limits<int64_t>::max(),
  };
  SD_DISPATCH(check, stream, verify_tree, params);
}

void verify_tree_cpu(const VerifyTreeParams& p) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t slot = slot_of(p.slots, b, p.num_slots);
      TreeWalk walk(p.links, b, p.tree_sizes[b], p.accept_width, p.out_tokens + b * p.accept_width,
                    p.out_path + b * p.accept_width);
      if (slot >= 0 && p.tree_sizes[b] > 0) {
        const T* rows = static_cast<const T*>(p.logits) + b * p.logits_batch_stride;
        while (walk.step(argmax(rows + walk.node * p.logits_node_stride, p.vocab))) {
        }
        if (walk.bits) set_status(p.status, slot, walk.bits);
      }
      walk.finish();
      p.out_len[b] = static_cast<int32_t>(walk.len);
    }
  });
}

}  // namespace specdec
