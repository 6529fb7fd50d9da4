// verify_tree on the CPU for sampled candidates (the walk: sampled_walk.h).
#include "verify/sampled_walk.h"

#include "verify/token_weights.h"

namespace specdec::verify {
namespace {

// Rows of SampledWalk on the CPU. The draw scans the draft's vocabulary in order of draft ids, then the target's tokens
// that the draft vocabulary lacks.
template <class T>
class CpuRows {
 public:
  CpuRows(const VerifyTreeParams& p, const std::vector<bool>& mapped, TokenWeights& target, TokenWeights& draft)
      : p_(p), mapped_(mapped), target_(target), draft_(draft) {}

  // Start the next request.
  void start(int64_t b, int64_t slot, const Sampler& sampler, const Sampler& draft_sampler) {
    b_ = b;
    slot_ = slot;
    sampler_ = sampler;
    draft_sampler_ = draft_sampler;
  }

  int32_t token(int32_t node, uint32_t position) {
    const LogitRow<T> row = logit_row<T>(p_, b_, slot_, node);
    return sampler_.greedy ? largest_id(row, p_.vocab) : target_.draw(row, p_.vocab, sampler_, position);
  }

  bool open(int32_t node, int32_t draft_row) {
    draft_.read(draft_logit_row<T>(p_, b_, draft_row), p_.drafts.vocab, draft_sampler_);
    return target_.read(logit_row<T>(p_, b_, slot_, node), p_.vocab, sampler_);
  }
  uint64_t target_total() const { return target_.total(); }
  uint64_t draft_total() const { return draft_.total(); }

  TokenPair pair(int32_t token) const {
    if (token < 0 || token >= p_.vocab) return {};
    int64_t d = token;
    if (p_.drafts.id_map) {
      const int32_t* end = p_.drafts.id_map + p_.drafts.vocab;
      const int32_t* found = std::find(p_.drafts.id_map, end, token);
      if (found == end) return {};
      d = found - p_.drafts.id_map;
    }
    return {target_[token], draft_[d]};
  }

  uint64_t set_residual(float scale) {
    scale_ = scale;
    residual_total_ = 0;
    for_each_residual([&](int64_t, uint64_t weight) {
      residual_total_ += weight;
      return false;
    });
    return residual_total_;
  }

  int32_t draw(uint64_t random) const {
    const uint64_t drawn = mul_high(random, residual_total_);
    uint64_t through = 0;
    int32_t token = -1;
    for_each_residual([&](int64_t v, uint64_t weight) {
      if ((through += weight) <= drawn) return false;
      token = static_cast<int32_t>(v);
      return true;
    });
    return token;
  }

 private:
  // Call f(token, residual weight) in draw order until f returns true.
  template <class F>
  void for_each_residual(F&& f) const {
    for (int64_t d = 0; d < p_.drafts.vocab; ++d) {
      const int64_t v = p_.drafts.id_map ? p_.drafts.id_map[d] : d;
      if (v >= 0 && v < p_.vocab && f(v, residual_weight(target_[v], draft_[d], scale_))) return;
    }
    if (!p_.drafts.id_map) return;
    for (int64_t v = 0; v < p_.vocab; ++v)
      if (!mapped_[static_cast<size_t>(v)] && f(v, target_[v])) return;
  }

  const VerifyTreeParams& p_;
  const std::vector<bool>& mapped_;
  TokenWeights &target_, &draft_;
  int64_t b_ = 0, slot_ = 0;
  Sampler sampler_, draft_sampler_;
  float scale_ = 0;
  uint64_t residual_total_ = 0;
};

// Return which target tokens are in the draft's vocabulary.
std::vector<bool> mapped_tokens(const VerifyTreeParams& p) {
  std::vector<bool> mapped(p.drafts.id_map ? static_cast<size_t>(p.vocab) : 0);
  for (int64_t d = 0; p.drafts.id_map && d < p.drafts.vocab; ++d) {
    const int32_t v = p.drafts.id_map[d];
    if (v >= 0 && v < p.vocab) mapped[static_cast<size_t>(v)] = true;
  }
  return mapped;
}

}  // namespace

void verify_sampled_cpu(const VerifyTreeParams& p) {
  const std::vector<bool> mapped = mapped_tokens(p);
  TokenWeights target, draft;
  with_float_type(p.logits_dtype, [&]<class T>() {
    CpuRows<T> rows(p, mapped, target, draft);
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t slot = slot_of(p.slots, b, p.num_slots);
      EmittedRow out = emitted_row(p, b);
      int32_t bits = 0;
      const int32_t size = slot < 0 ? 0 : walked_size(p, b, bits);
      if (size > 0) {
        const Sampler sampler = sampler_of(p.sampling, slot, p.vocab), draft_sampler = draft_sampler_of(p, slot);
        rows.start(b, slot, sampler, draft_sampler);
        const bool drafts_sampled = !sampler.greedy && !draft_sampler.greedy;
        bits |= SampledWalk<CpuRows<T>>(p, b, size, sampler, drafts_sampled, rows, out, true).run();
      }
      finish_walk(p, b, slot, bits, out);
    }
  });
}

}  // namespace specdec::verify
