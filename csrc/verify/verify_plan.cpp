// Rules that choose verify_tree's GPU kernel (verify_plan.h).
#include "verify/verify_plan.h"

#include <algorithm>
#include <string_view>

#include "core/dispatch.h"

namespace specdec::verify {
namespace {

// Maximum blocks per node's row; bytes of a row that occupy one block (a 16-byte vector for each of its 512 threads);
// threads of the block that walks afterwards, one per part of a greedy tree's nodes.
constexpr int64_t kMaxParts = 8, kBytesPerPart = 512 * 16, kWalkThreads = 512;

// Return whether reading all rows is at least as fast as walking to a leaf. Measured with V = 128256 on an H200.
bool prefers_at_once(const VerifyShape& s, const Device& device) {
  const int64_t rows = s.rows, bytes = rows * s.vocab * s.logit_bytes;
  return s.num_nodes <= (s.sampled ? 64 : 32) && bytes <= (s.sampled ? 40 << 20 : 24 << 20) && rows <= device.num_sms &&
         s.batch <= kMaxGridY;  // most packed requests may lack a row
}

// Return the number of blocks per row, a power of two: no SM gets more blocks than another. The blocks of a sampled row
// are a cluster, and clusters of more than two blocks cannot use a tenth of the SMs.
int num_parts(const VerifyShape& s, const Device& device) {
  const int64_t rows = std::max(s.rows, s.num_nodes), all = device.num_sms, most = all * 9 / 10;
  const int64_t useful = std::min(kMaxParts, s.vocab * s.logit_bytes / kBytesPerPart);
  const int64_t limit = s.sampled && !device.is_hopper_or_later ? 1 : useful;
  int64_t parts = 1;
  while (2 * parts <= limit && 2 * parts * rows <= (s.sampled && parts > 1 ? most : all)) parts *= 2;
  // Use two blocks per SM where nearly all SMs have one and registers suffice for two.
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
  else if (prefers_at_once(shape, device))
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
  if (plan.kernel == VerifyKernel::kAtOnce) plan.parts = num_parts(shape, device);
  return plan;
}

std::pair<std::string, int> verify_plan(int64_t batch, int64_t num_nodes, int64_t vocab, int64_t logit_bytes,
                                        bool sampled, bool rejects, int64_t num_sms, bool is_hopper_or_later) {
  Device device{};
  device.num_sms = static_cast<int>(num_sms);
  device.is_hopper_or_later = is_hopper_or_later;
  const VerifyPlan plan =
      plan_verify(Check("verify_plan"), {batch, num_nodes, batch * num_nodes, vocab, logit_bytes, sampled, rejects},
                  device, std::nullopt);
  return {plan.name(), plan.parts};
}

}  // namespace specdec::verify
