#include "layers/gemm/small_m_gemm_plan.h"

namespace specdec::layers {
namespace {

// Up to where our kernels were measured to be quicker than cuBLAS: with so few rows whatever the weight, and on Hopper
// with more, by a weight whose rows its blocks take at once (docs/notebook/small_m_gemm.md).
constexpr int64_t kFewRows = 64, kMoreRows = 128, kMoreOuts = 32768;

bool can_run(const LinearShape& s, const Device& device) {
  if (s.rows <= 0) return false;
  if (s.bits < 16) return device.has_wgmma && !s.overlaps && s.ins % (1024 / s.bits) == 0 && s.outs % 16 == 0;
  return s.bits == 16 && s.ins % 64 == 0 && (!s.gated || s.outs % 16 == 0);
}

// The better of our kernels. The copy engine takes no rows that overlap.
LinearPlan kernel_of(const LinearShape& s, const Device& device) {
  return device.has_wgmma && !s.overlaps ? LinearPlan::kWgmma : LinearPlan::kMma;
}

}  // namespace

LinearPlan plan_linear(const LinearShape& s, const Device& device) {
  const bool more = s.rows <= kMoreRows && s.outs <= kMoreOuts && s.bits == 16 && device.has_wgmma;
  return can_run(s, device) && (s.rows <= kFewRows || more) ? kernel_of(s, device) : LinearPlan::kLibrary;
}

LinearPlan plan_small_m_gemm(const Check& check, const LinearShape& shape, const Device& device,
                             const std::optional<std::string>& name) {
  const LinearPlan best = kernel_of(shape, device);
  check.that(shape.bits == 16 || best == LinearPlan::kWgmma, "weight", {"has numbers of ", shape.bits, " bits"},
             "16 bits, which is all that this device and these rows have a kernel for");
  if (!name) return best;
  for (const LinearPlan plan : {shape.bits == 16 ? LinearPlan::kMma : best, best})
    if (*name == to_string(plan)) return plan;
  check.that(false, "plan", {"is ", *name},
             shape.bits < 16            ? "sm90.wgmma, which is all that numbers of fewer bits have"
             : best == LinearPlan::kMma ? "sm80.mma, which is all that this device and these rows have"
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

std::string small_m_gemm_plan_of_sizes(int64_t rows, int64_t outs, int64_t ins, int64_t bits, bool gated,
                                       bool has_wgmma) {
  const LinearShape shape{.rows = rows, .outs = outs, .ins = ins, .bits = static_cast<int>(bits), .gated = gated};
  Device device{};
  device.has_wgmma = has_wgmma;
  return to_string(plan_linear(shape, device));
}

}  // namespace specdec::layers
