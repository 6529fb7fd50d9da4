#include "verify/verify_tree.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace specdec {
namespace {

// The lowest id with the largest logit, or -1 when none is above -inf.
template <class T>
int32_t largest_id(const LogitRow<T>& row, int64_t vocab) {
  float best = -std::numeric_limits<float>::infinity();
  int32_t id = -1;
  for (int64_t v = 0; v < vocab; ++v) {
    const float x = row[v];
    if (x > best) {
      best = x;
      id = static_cast<int32_t>(v);
    }
  }
  return id;
}

// The tokens of one row that a request may get, with their weights.
class TokenDraw {
 public:
  template <class T>
  int32_t token(const LogitRow<T>& row, int64_t vocab, const Sampler& sampler, uint32_t position) {
    scale_ = {-std::numeric_limits<float>::infinity(), sampler.scale};
    logits_.resize(static_cast<size_t>(vocab));
    for (int64_t v = 0; v < vocab; ++v) scale_.max = std::max(scale_.max, logits_[v] = row[v]);
    if (scale_.max == -std::numeric_limits<float>::infinity()) return -1;

    const float threshold = sampler.filters_by_key() ? threshold_of(sampler) : -std::numeric_limits<float>::infinity();
    const auto kept = [&](float x) { return x >= threshold ? sampler.after_min_p(scale_.weight(x)) : 0; };
    uint64_t total = 0, through = 0;
    for (float x : logits_) total += kept(x);
    const uint64_t drawn = drawn_weight(sampler.seed, position, total);
    for (int64_t v = 0; v < vocab; ++v)
      if ((through += kept(logits_[v])) > drawn) return static_cast<int32_t>(v);
    return -1;  // not reached: total > drawn
  }

 private:
  // The lowest logit that top-k and top-p keep.
  float threshold_of(const Sampler& sampler) {
    sorted_ = logits_;
    auto end = sorted_.end();
    if (sampler.top_k > 0) {
      const auto last = sorted_.begin() + sampler.top_k - 1;
      std::nth_element(sorted_.begin(), last, end, std::greater<>());
      const float least = *last;
      end = std::partition(last + 1, end, [=](float x) { return x == least; });  // ties of the last one stay
      if (sampler.top_p >= 1) return least;
    }
    std::sort(sorted_.begin(), end, std::greater<>());
    uint64_t total = 0, reached = 0;
    for (auto x = sorted_.begin(); x != end; ++x) total += scale_.weight(*x);
    const uint64_t wanted = top_p_weight(sampler.top_p, total);
    auto x = sorted_.begin();
    while ((reached += scale_.weight(*x)) < wanted) ++x;
    return *x;
  }

  std::vector<float> logits_, sorted_;
  RowScale scale_{};
};

}  // namespace

void verify_tree(CallStream stream, const TensorView& logits, const TensorView& tokens, const TensorView& parents,
                 const TensorView& positions, const TensorView& first_child, const TensorView& next_sibling,
                 const TensorView& num_nodes, int64_t accept_width, const OptTensor& slots,
                 const OptTensor& temperature, const OptTensor& top_k, const OptTensor& top_p, const OptTensor& min_p,
                 const OptTensor& seeds, const OptTensor& vocab_mask, const OptTensor& logit_bias,
                 const OptTensor& status, const TensorView& out_tokens, const TensorView& out_len,
                 const TensorView& out_path) {
  Check check("verify_tree");
  Dim B{"batch"}, N{"num_nodes"}, V{"vocab"}, S{"accept_width", accept_width}, R{"num_slots"};
  check.strided("logits", logits, {B, N, V}, kFloats);
  check.range("vocab", V, 1, kMaxVocab);
  check.tensor("tokens", tokens, {B, N}, kInt32);
  check.range("tree width", N, 1, kMaxVerifiedNodes);
  check.tensor("parents", parents, {B, N}, kInt32);
  check.tensor("positions", positions, {B, N}, kInt32);
  check.tensor("first_child", first_child, {B, N}, kInt32);
  check.tensor("next_sibling", next_sibling, {B, N}, kInt32);
  check.tensor("num_nodes", num_nodes, {B}, kInt32);
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
  check.tensor("vocab_mask", vocab_mask, {B, N, mask_words}, kInt32);
  if (logit_bias) check.strided("logit_bias", *logit_bias, {R, V}, kFloat32);
  check.output("status", status, {R}, kInt32);
  const bool has_slots = R.value >= 0;
  if (has_slots)
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
      .positions = positions.data<int32_t>(),
      .tree_sizes = num_nodes.data<int32_t>(),
      .sampling = {.temperature = data_or_null<const float>(temperature),
                   .top_k = data_or_null<const int32_t>(top_k),
                   .top_p = data_or_null<const float>(top_p),
                   .min_p = data_or_null<const float>(min_p),
                   .seeds = data_or_null<const int64_t>(seeds)},
      .vocab_mask = data_or_null<const int32_t>(vocab_mask),
      .logit_bias = data_or_null<const float>(logit_bias),
      .bias_stride = logit_bias ? logit_bias->stride(0) : 0,
      .mask_words = mask_words,
      .slots = data_or_null<const int32_t>(slots),
      .status = data_or_null<int32_t>(status),
      .out_tokens = out_tokens.data<int32_t>(),
      .out_len = out_len.data<int32_t>(),
      .out_path = out_path.data<int32_t>(),
      .batch = B,
      .vocab = V,
      .accept_width = S,
      // Without slot state only the sign of slots[b] says anything.
      .num_slots = has_slots ? R.value : std::numeric_limits<int64_t>::max(),
  };
  SD_DISPATCH(check, stream, verify_tree, params);
}

void verify_tree_cpu(const VerifyTreeParams& p) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    TokenDraw draw;
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t slot = slot_of(p.slots, b, p.num_slots);
      const auto nodes = [&](int64_t i) { return read_node(p.links, b, i); };
      EmittedRow out = emitted_row(p, b);
      int32_t bits = 0;
      const int32_t size = slot < 0 ? 0 : tree_size(p.tree_sizes[b], p.links.num_nodes, bits);
      const Sampler sampler = size > 0 ? sampler_of(p.sampling, slot, p.vocab) : Sampler{};

      for (int32_t node = size > 0 ? 0 : kNoChild; node >= 0;) {
        const LogitRow<T> row = logit_row<T>(p, b, slot, node);
        const int32_t token =
            sampler.greedy ? largest_id(row, p.vocab) : draw.token(row, p.vocab, sampler, position_after(p, b, node));
        if (token < 0) bits |= kBadLogits;
        if (token < 0 || !out.emit(token, node)) break;
        node = find_child(nodes, size, node, token);
        if (node == kMalformed) bits |= kBadTree;
      }
      if (bits) set_status(p.status, slot, bits);
      out.finish();
      p.out_len[b] = static_cast<int32_t>(out.len);
    }
  });
}

}  // namespace specdec
