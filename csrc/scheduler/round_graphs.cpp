// Stubs for builds without CUDA, which have no graphs and no streams.
#include "scheduler/round_graphs.h"

#ifndef SPECDEC_WITH_CUDA

#include "core/errors.h"

namespace specdec::scheduler {

RoundGraphs::RoundGraphs(CUstream_st*) : stream_(nullptr) {
  throw NotImplementedError(
      "Scheduler: stream is given, expected None (this build of specdec_kernels has no CUDA half)");
}
RoundGraphs::~RoundGraphs() = default;
void RoundGraphs::add(const Size&, const std::vector<CUgraph_st*>&) {}
void RoundGraphs::clear() {}
bool RoundGraphs::launch(const Size&, Part) { return false; }
bool RoundGraphs::busy() const { return false; }

}  // namespace specdec::scheduler

#endif
