// How verify_tree finds a batch's tokens on a GPU: a value, made on the host from sizes and the device. Nothing here
// knows CUDA, so that the rules compile, and are tested, where there is no GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/device.h"

namespace specdec::verify {

enum class VerifyKernel {
  kWalk,       // verify_tree.cu: node by node, each request by a cluster that reads the rows of visited nodes alone
  kAtOnce,     // verify_at_once.cu: the tokens of all nodes, and then a walk that looks them up
  kRejection,  // sampled_walk.cu: node by node, where candidates were sampled
};

struct VerifyShape {
  int64_t batch, num_nodes;
  int64_t rows;  // batch * num_nodes, or fewer where they are packed
  int64_t vocab;
  int64_t logit_bytes;  // of one: 4 or 2
  bool sampled;         // there are parameters of sampling; else all requests are greedy
  bool rejects;         // candidates were sampled
};

struct VerifyPlan {
  VerifyKernel kernel = VerifyKernel::kWalk;
  int parts = 0;  // blocks that share a node's row, of kAtOnce; else 0

  // As "walk", "at_once", "rejection".
  std::string name() const;
  int64_t workspace_bytes(const VerifyShape& shape) const;
};

// The plan of a call, of which `name` forces the kernel. Throws ValueError by `check` for a name that is none, and for
// a kernel that does not fit the call.
VerifyPlan plan_verify(const Check& check, const VerifyShape& shape, const Device& device,
                       const std::optional<std::string>& name);

// The name of the plan, and its parts, without tensors or a device.
std::pair<std::string, int> verify_plan(int64_t batch, int64_t num_nodes, int64_t vocab, int64_t logit_bytes,
                                        bool sampled, bool rejects, int64_t multiprocessors, bool is_hopper_or_later);

}  // namespace specdec::verify
