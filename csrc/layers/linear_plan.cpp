#include "layers/linear_plan.h"

namespace specdec::layers {
namespace {

// Up to where our kernels were measured to be quicker than cuBLAS: with so few rows whatever the weight, and on Hopper
// with more, by a weight whose rows its blocks take at once (docs/notebook/linear_rows.md).
constexpr int64_t kFewRows = 64, kMoreRows = 128, kMoreOuts = 32768;

bool can_run(const LinearShape& s) {
  return s.is_16_bit && s.rows > 0 && s.ins % 64 == 0 && (!s.gated || s.outs % 16 == 0);
}

// The better of our kernels. The copy engine takes no rows that overlap.
LinearPlan kernel_of(const LinearShape& s, const Device& device) {
  return device.has_wgmma && !s.overlaps ? LinearPlan::kWgmma : LinearPlan::kMma;
}

}  // namespace

LinearPlan plan_linear(const LinearShape& s, const Device& device) {
  const bool pays = s.rows <= kFewRows || (s.rows <= kMoreRows && s.outs <= kMoreOuts && device.has_wgmma);
  return can_run(s) && pays ? kernel_of(s, device) : LinearPlan::kLibrary;
}

LinearPlan plan_linear_rows(const Check& check, const LinearShape& shape, const Device& device,
                            const std::optional<std::string>& name) {
  const LinearPlan best = kernel_of(shape, device);
  if (!name) return best;
  for (const LinearPlan plan : {LinearPlan::kMma, best})
    if (*name == to_string(plan)) return plan;
  check.that(false, "plan", {"is ", *name},
             best == LinearPlan::kMma ? "sm80.mma, which is all that this device and these rows have"
                                      : "sm80.mma or sm90.wgmma");
  return best;
}

const char* to_string(LinearPlan plan) {
  switch (plan) {
    case LinearPlan::kLibrary:
      return "library";
    case LinearPlan::kMma:
      return "sm80.mma";
    case LinearPlan::kWgmma:
      return "sm90.wgmma";
  }
  return "";
}

std::string linear_plan(int64_t rows, int64_t outs, int64_t ins, bool is_16_bit, bool gated, bool has_wgmma) {
  const LinearShape shape{.rows = rows, .outs = outs, .ins = ins, .is_16_bit = is_16_bit, .gated = gated};
  Device device{};
  device.has_wgmma = has_wgmma;
  return to_string(plan_linear(shape, device));
}

}  // namespace specdec::layers
