// Who multiplies rows by a weight: a value, made on the host from sizes and the device. Nothing here knows CUDA, so
// that the rules compile, and are tested, where there is no GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/check.h"
#include "core/device.h"

namespace specdec::layers {

enum class LinearPlan {
  kLibrary,  // the caller's own library, which is cuBLAS on a GPU
  kMma,      // small_m_gemm.cu: mma.sync, compute capability 8.0 and later
  kWgmma,    // wgmma_small_m_gemm.cu: Hopper
};

// x [rows, ins] times weight [outs, ins].
struct LinearShape {
  int64_t rows, outs, ins;
  int bits = 16;          // of a number of the weight; of x 8 where it is 8, else 16
  bool gated = false;     // outs are those of a gate and of what it gates
  bool overlaps = false;  // rows of x or of the weight do, in memory
};

// Who is quickest.
LinearPlan plan_linear(const LinearShape& shape, const Device& device);

// The kernel that runs a call of small_m_gemm, which `name` forces. Throws ValueError by `check` for a name that is
// none, and for a kernel that the device does not have.
LinearPlan plan_small_m_gemm(const Check& check, const LinearShape& shape, const Device& device,
                             const std::optional<std::string>& name);

// As "library", "sm80.mma", "sm90.wgmma".
const char* to_string(LinearPlan plan);

// plan_linear without tensors or a device.
std::string small_m_gemm_plan_of_sizes(int64_t rows, int64_t outs, int64_t ins, int64_t bits, bool gated,
                                       bool has_wgmma);

}  // namespace specdec::layers
