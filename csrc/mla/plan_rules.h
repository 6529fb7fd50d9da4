// The rules per architecture; private to plan.cpp and plan_sm*.cpp.
#pragma once

#include "mla/plan.h"

namespace specdec::mla {

// The fields that the name of a forced plan sets; the rules fill in the rest.
struct PlanOptions {
  std::optional<Kernel> kernel;
  std::optional<int> tile_rows, splits;
  std::optional<bool> whole_items;
};

MlaPlan plan_sm90(const MlaShape& shape, int64_t max_kv_len, const Device& device, const PlanOptions& forced);
MlaPlan plan_sm80(const MlaShape& shape, int64_t max_kv_len, const Device& device, const PlanOptions& forced);

// Return whether kWgmma can run.
bool can_use_wgmma(const MlaShape& shape, const Device& device);

// Return the largest row tile whose shared memory the device has, or 0 if it has too little for any.
int largest_tile_sm80(const Device& device);

// Set plan.splits, where the kernel does not force it: enough for `blocks` blocks in all, or as fixed_split says.
void set_splits(MlaPlan& plan, const MlaShape& shape, int64_t max_kv_len, int64_t blocks, const PlanOptions& forced);

}  // namespace specdec::mla
