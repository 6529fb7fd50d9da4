#include "layers/gemm/small_m_gemm_plan.h"

namespace specdec::layers {
namespace {

// Sizes up to which our kernels measured faster than cuBLAS: kFewRows with any weight; on Hopper, kMoreRows with a
// weight whose rows fit one group of tiles per block, kMoreOuts (docs/tried.md).
constexpr int64_t kFewRows = 64, kMoreRows = 128, kMoreOuts = 32768;

bool can_run(const GemmShape& s, const Device& device) {
  if (s.rows <= 0) return false;
  if (s.bits < 16) return device.has_wgmma && !s.overlaps && s.ins % (1024 / s.bits) == 0 && s.outs % 16 == 0;
  return s.bits == 16 && s.ins % 64 == 0 && (!s.gated || s.outs % 16 == 0);
}

// Return the better of our kernels. TMA does not support overlapping rows.
GemmPlan best_kernel(const GemmShape& s, const Device& device) {
  return device.has_wgmma && !s.overlaps ? GemmPlan::kWgmma : GemmPlan::kMma;
}

}  // namespace

GemmPlan fastest_plan(const GemmShape& s, const Device& device) {
  const bool more = s.rows <= kMoreRows && s.outs <= kMoreOuts && s.bits == 16 && device.has_wgmma;
  return can_run(s, device) && (s.rows <= kFewRows || more) ? best_kernel(s, device) : GemmPlan::kLibrary;
}

GemmPlan plan_small_m_gemm(const Check& check, const GemmShape& shape, const Device& device,
                           const std::optional<std::string>& name) {
  const GemmPlan best = best_kernel(shape, device);
  check.that(shape.bits == 16 || best == GemmPlan::kWgmma, "weight", {"has ", shape.bits, "-bit elements"},
             "16-bit elements, the only ones that this device and these rows have a kernel for");
  if (!name) return best;
  for (const GemmPlan plan : {shape.bits == 16 ? GemmPlan::kMma : best, best})
    if (*name == to_string(plan)) return plan;
  check.that(false, "plan", {"is ", *name},
             shape.bits < 16          ? "sm90.wgmma, the only kernel for FP8 and INT4 weights"
             : best == GemmPlan::kMma ? "sm80.mma, the only kernel for this device and these rows"
                                      : "sm80.mma or sm90.wgmma");
  return best;
}

const char* to_string(GemmPlan plan) {
  switch (plan) {
    case GemmPlan::kLibrary:
      return "library";
    case GemmPlan::kMma:
      return "sm80.mma";
    case GemmPlan::kWgmma:
      return "sm90.wgmma";
  }
  return "";
}

std::string small_m_gemm_plan_of_sizes(int64_t rows, int64_t outs, int64_t ins, int64_t bits, bool gated,
                                       bool has_wgmma) {
  const GemmShape shape{.rows = rows, .outs = outs, .ins = ins, .bits = static_cast<int>(bits), .gated = gated};
  Device device{};
  device.has_wgmma = has_wgmma;
  return to_string(fastest_plan(shape, device));
}

}  // namespace specdec::layers
