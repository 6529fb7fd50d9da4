// The plan of a small-M GEMM: which implementation runs it, chosen on the host from sizes and the device. This header
// does not depend on CUDA, so the rules compile and are tested without a GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/check.h"
#include "core/device.h"

namespace specdec::layers {

enum class GemmPlan {
  kLibrary,  // the caller's own GEMM (cuBLAS on a GPU)
  kMma,      // small_m_gemm.cu: mma.sync, compute capability 8.0 and later
  kWgmma,    // wgmma_small_m_gemm.cu: Hopper
};

// x [rows, ins] times weight [outs, ins].
struct GemmShape {
  int64_t rows, outs, ins;
  int bits = 16;          // per weight element; x has 8 if this is 8, else 16
  bool gated = false;     // the weight's rows are gate and up rows
  bool overlaps = false;  // rows of x or of the weight overlap in memory
};

// Return the fastest implementation, by measured rules.
GemmPlan fastest_plan(const GemmShape& shape, const Device& device);

// Return the kernel that runs a call of small_m_gemm: the one `name` forces, or the best one. Throws ValueError through
// `check` for an unknown name or a kernel that the device lacks.
GemmPlan plan_small_m_gemm(const Check& check, const GemmShape& shape, const Device& device,
                           const std::optional<std::string>& name);

// Return "library", "sm80.mma" or "sm90.wgmma".
const char* to_string(GemmPlan plan);

// Return the name of fastest_plan() for given sizes, without tensors or a device.
std::string small_m_gemm_plan_of_sizes(int64_t rows, int64_t outs, int64_t ins, int64_t bits, bool gated,
                                       bool has_wgmma);

}  // namespace specdec::layers
