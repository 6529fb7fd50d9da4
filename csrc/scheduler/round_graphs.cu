#include <algorithm>
#include <utility>
#include <vector>

#include "core/cuda.cuh"
#include "scheduler/round_graphs.h"

namespace specdec::scheduler {
namespace {

constexpr const char* kName = "round graph";
constexpr int kThreads = 256, kMostBlocks = 512;

// Writes a word of 1, 2 or 4 bytes `count` times.
template <class T>
__global__ void __launch_bounds__(kThreads) fill_kernel(T* out, T value, size_t count) {
  const size_t step = static_cast<size_t>(gridDim.x) * kThreads;
  for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) out[i] = value;
}

template <class T>
cudaGraphNode_t add_fill(cudaGraph_t graph, const std::vector<cudaGraphNode_t>& before, const cudaMemsetParams& set) {
  T* out = static_cast<T*>(set.dst);
  T value = static_cast<T>(set.value);
  size_t count = set.width;
  void* arguments[] = {&out, &value, &count};
  cudaKernelNodeParams kernel{};
  kernel.func = reinterpret_cast<void*>(fill_kernel<T>);
  kernel.gridDim = dim3(static_cast<unsigned>(std::min<size_t>((count + kThreads - 1) / kThreads, kMostBlocks)));
  kernel.blockDim = dim3(kThreads);
  kernel.kernelParams = arguments;
  cudaGraphNode_t node = nullptr;
  SD_CUDA_CHECK(kName, cudaGraphAddKernelNode(&node, graph, before.data(), before.size(), &kernel));
  return node;
}

// Returns the nodes that `get` lists, for a graph or a node.
template <class Get>
std::vector<cudaGraphNode_t> nodes_of(Get&& get) {
  size_t count = 0;
  SD_CUDA_CHECK(kName, get(nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0) SD_CUDA_CHECK(kName, get(nodes.data(), &count));
  return nodes;
}

#if CUDART_VERSION >= 13000  // here these take edge types; edges of a memset are plain
#define SD_PLAIN_EDGES nullptr,
#else
#define SD_PLAIN_EDGES
#endif

// Replaces memsets by kernels. The device starts consecutive kernels by itself; each memset between them (cuBLAS
// captures dozens in a round of many rows) costs the host one to two microseconds per launch.
void replace_memsets(cudaGraph_t graph) {
  for (cudaGraphNode_t node :
       nodes_of([&](cudaGraphNode_t* nodes, size_t* count) { return cudaGraphGetNodes(graph, nodes, count); })) {
    cudaGraphNodeType type{};
    SD_CUDA_CHECK(kName, cudaGraphNodeGetType(node, &type));
    if (type != cudaGraphNodeTypeMemset) continue;
    cudaMemsetParams set{};
    SD_CUDA_CHECK(kName, cudaGraphMemsetNodeGetParams(node, &set));
    if (set.height != 1 || set.width == 0) continue;

    const auto before = nodes_of([&](cudaGraphNode_t* nodes, size_t* count) {
      return cudaGraphNodeGetDependencies(node, nodes, SD_PLAIN_EDGES count);
    });
    const auto draft_lag = nodes_of([&](cudaGraphNode_t* nodes, size_t* count) {
      return cudaGraphNodeGetDependentNodes(node, nodes, SD_PLAIN_EDGES count);
    });
    const cudaGraphNode_t fill = set.elementSize == 4   ? add_fill<uint32_t>(graph, before, set)
                                 : set.elementSize == 2 ? add_fill<uint16_t>(graph, before, set)
                                                        : add_fill<uint8_t>(graph, before, set);
    const std::vector<cudaGraphNode_t> fills(draft_lag.size(), fill);
    SD_CUDA_CHECK(kName,
                  cudaGraphAddDependencies(graph, fills.data(), draft_lag.data(), SD_PLAIN_EDGES draft_lag.size()));
    SD_CUDA_CHECK(kName, cudaGraphDestroyNode(node));
  }
}

}  // namespace

RoundGraphs::RoundGraphs(CUstream_st* stream) : stream_(stream) { SD_CUDA_CHECK(kName, cudaGetDevice(&device_)); }

RoundGraphs::~RoundGraphs() { clear(); }

void RoundGraphs::clear() {
  for (const auto& [size, graphs] : graphs_)
    for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
  graphs_.clear();
}

void RoundGraphs::add(const Size& size, const std::vector<CUgraph_st*>& graphs) {
  const DeviceGuard guard(device_);
  for (CUgraph_st* graph : graphs) {
    replace_memsets(graph);
    cudaGraphExec_t& executable = graphs_[size].emplace_back(nullptr);
    SD_CUDA_CHECK(kName, cudaGraphInstantiate(&executable, graph, 0));
    SD_CUDA_CHECK(kName, cudaGraphUpload(executable, stream_));  // else the first launch would do it
  }
}

bool RoundGraphs::launch(const Size& size, Part part) {
  const auto graph = graphs_.lower_bound(size);  // KV buckets of one batch and number of nodes are adjacent, increasing
  const auto batch_and_nodes = [](const Size& of) { return std::pair(std::get<0>(of), std::get<1>(of)); };
  if (graph == graphs_.end() || batch_and_nodes(graph->first) != batch_and_nodes(size)) return false;
  const DeviceGuard guard(device_);
  const std::vector<cudaGraphExec_t>& all = graph->second;
  const size_t begin = part == Part::kRest ? 1 : 0, end = part == Part::kFirst ? 1 : all.size();
  for (size_t i = begin; i < end; ++i) SD_CUDA_CHECK(kName, cudaGraphLaunch(all[i], stream_));
  return true;
}

bool RoundGraphs::busy() const {
  const cudaError_t state = cudaStreamQuery(stream_);
  if (state == cudaErrorNotReady) return true;
  SD_CUDA_CHECK(kName, state);
  return false;
}

}  // namespace specdec::scheduler
