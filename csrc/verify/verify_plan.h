// The plan of a verify_tree call on a GPU: which kernel runs, chosen on the host from sizes and the device. Free of
// CUDA, so that the rules compile and are tested without a GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/device.h"

namespace specdec::verify {

enum class VerifyKernel {
  kWalk,       // verify_tree.cu: node by node; one cluster per request reads only the rows of visited nodes
  kAtOnce,     // verify_at_once.cu: the tokens of all nodes in parallel, then a walk that looks them up
  kRejection,  // sampled_walk.cu: node by node with rejection sampling, for sampled candidates
};

struct VerifyShape {
  int64_t batch, num_nodes;
  int64_t rows;  // batch * num_nodes, or fewer if packed
  int64_t vocab;
  int64_t logit_bytes;  // per logit: 4 or 2
  bool sampled;         // sampling parameters are given; else all requests are greedy
  bool rejects;         // candidates were sampled
};

struct VerifyPlan {
  VerifyKernel kernel = VerifyKernel::kWalk;
  int parts = 0;  // blocks per node's row for kAtOnce; else 0

  // Return "walk", "at_once" or "rejection".
  std::string name() const;
  int64_t workspace_bytes(const VerifyShape& shape) const;
};

// Choose the plan of a call; `name` forces the kernel. Throw ValueError through `check` for an unknown name or a kernel
// that does not fit the call.
VerifyPlan plan_verify(const Check& check, const VerifyShape& shape, const Device& device,
                       const std::optional<std::string>& name);

// Return a plan's name and parts, without tensors or a device.
std::pair<std::string, int> verify_plan(int64_t batch, int64_t num_nodes, int64_t vocab, int64_t logit_bytes,
                                        bool sampled, bool rejects, int64_t num_sms, bool is_hopper_or_later);

}  // namespace specdec::verify
