#include "core/cuda.cuh"
#include "scheduler/round_graphs.h"

namespace specdec::scheduler {
namespace {
constexpr const char* kName = "round graph";
}

RoundGraphs::RoundGraphs(CUstream_st* stream) : stream_(stream) { SD_CUDA_CHECK(kName, cudaGetDevice(&device_)); }

RoundGraphs::~RoundGraphs() {
  for (const auto& [size, graph] : graphs_) cudaGraphExecDestroy(graph);
}

void RoundGraphs::add(int64_t batch, int64_t num_nodes, CUgraph_st* graph) {
  const DeviceGuard guard(device_);
  cudaGraphExec_t& executable = graphs_[{batch, num_nodes}];
  SD_CUDA_CHECK(kName, cudaGraphInstantiate(&executable, graph, 0));
  SD_CUDA_CHECK(kName, cudaGraphUpload(executable, stream_));  // else its first launch would
}

bool RoundGraphs::launch(int64_t batch, int64_t num_nodes) {
  const auto graph = graphs_.find({batch, num_nodes});
  if (graph == graphs_.end()) return false;
  const DeviceGuard guard(device_);
  SD_CUDA_CHECK(kName, cudaGraphLaunch(graph->second, stream_));
  return true;
}

bool RoundGraphs::busy() const {
  const cudaError_t state = cudaStreamQuery(stream_);
  if (state == cudaErrorNotReady) return true;
  SD_CUDA_CHECK(kName, state);
  return false;
}

}  // namespace specdec::scheduler
