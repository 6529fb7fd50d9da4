#include "verify/verify_plan.h"

#include <algorithm>
#include <string_view>

#include "core/dispatch.h"

namespace specdec::verify {
namespace {

// Blocks that may share a node's row; and bytes of a row that keep one busy, a vector of 16 for each of its 512
// threads. The block that walks afterwards has a thread for each part of a greedy tree's nodes.
constexpr int64_t kMaxParts = 8, kBytesOfPart = 512 * 16, kWalkThreads = 512;

// Whether reading all rows takes no longer than walking to a leaf: as measured with V = 128256 on an H200.
bool is_quicker_at_once(const VerifyShape& s, const Device& device) {
  const int64_t rows = s.rows, bytes = rows * s.vocab * s.logit_bytes;
  return s.num_nodes <= (s.sampled ? 64 : 32) && bytes <= (s.sampled ? 40 << 20 : 24 << 20) && rows <= device.num_sms &&
         s.batch <= kMaxGridY;  // of packed requests most may have no row
}

// A power of two: no multiprocessor has more blocks than another. The blocks of a sampled row are a cluster, and of
// clusters of more than two blocks a tenth of the multiprocessors is out of reach.
int parts_of(const VerifyShape& s, const Device& device) {
  const int64_t rows = std::max(s.rows, s.num_nodes), all = device.num_sms, most = all * 9 / 10;
  const int64_t useful = std::min(kMaxParts, s.vocab * s.logit_bytes / kBytesOfPart);
  const int64_t limit = s.sampled && !device.is_hopper_or_later ? 1 : useful;
  int64_t parts = 1;
  while (2 * parts <= limit && 2 * parts * rows <= (s.sampled && parts > 1 ? most : all)) parts *= 2;
  // Two blocks on each multiprocessor, where nearly all have one and registers suffice for two.
  if (!s.sampled && 2 * parts <= limit && parts * rows >= most && 2 * parts * s.num_nodes <= kWalkThreads) parts *= 2;
  return static_cast<int>(parts);
}

struct KernelName {
  VerifyKernel kernel;
  std::string_view name;
};
constexpr KernelName kKernelNames[] = {
    {VerifyKernel::kWalk, "walk"}, {VerifyKernel::kAtOnce, "at_once"}, {VerifyKernel::kRejection, "rejection"}};

}  // namespace

std::string VerifyPlan::name() const {
  return std::string(std::ranges::find(kKernelNames, kernel, &KernelName::kernel)->name);
}

int64_t VerifyPlan::workspace_bytes(const VerifyShape& shape) const {
  return shape.rows * parts * static_cast<int64_t>(sizeof(uint64_t));
}

VerifyPlan plan_verify(const Check& check, const VerifyShape& shape, const Device& device,
                       const std::optional<std::string>& name) {
  VerifyPlan plan{VerifyKernel::kWalk, 0};
  if (shape.rejects)
    plan.kernel = VerifyKernel::kRejection;
  else if (is_quicker_at_once(shape, device))
    plan.kernel = VerifyKernel::kAtOnce;
  if (name) {
    const auto* named = std::ranges::find(kKernelNames, *name, &KernelName::name);
    check.that(named != std::end(kKernelNames), "plan", {"is ", *name}, "walk, at_once or rejection");
    check.that(
        (named->kernel == VerifyKernel::kRejection) == shape.rejects, "plan", {"is ", *name},
        shape.rejects ? "rejection, since draft_logits is given" : "walk or at_once, since draft_logits is None");
    check.that(named->kernel != VerifyKernel::kAtOnce || shape.batch <= kMaxGridY, "plan", {"is ", *name},
               {"walk for a batch above ", kMaxGridY});
    plan.kernel = named->kernel;
  }
  if (plan.kernel == VerifyKernel::kAtOnce) plan.parts = parts_of(shape, device);
  return plan;
}

std::pair<std::string, int> verify_plan(int64_t batch, int64_t num_nodes, int64_t vocab, int64_t logit_bytes,
                                        bool sampled, bool rejects, int64_t multiprocessors, bool is_hopper_or_later) {
  Device device{};
  device.num_sms = static_cast<int>(multiprocessors);
  device.is_hopper_or_later = is_hopper_or_later;
  const VerifyPlan plan =
      plan_verify(Check("verify_plan"), {batch, num_nodes, batch * num_nodes, vocab, logit_bytes, sampled, rejects},
                  device, std::nullopt);
  return {plan.name(), plan.parts};
}

}  // namespace specdec::verify
