// Rounds as CUDA graphs: captured by torch, instantiated here, launched without Python.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

struct CUgraph_st;  // cudaGraph_t and cudaGraphExec_t are pointers to these
struct CUgraphExec_st;
struct CUstream_st;

namespace specdec::scheduler {

class RoundGraphs {
 public:
  // Uses the current device and this stream.
  explicit RoundGraphs(CUstream_st* stream);
  ~RoundGraphs();
  RoundGraphs(const RoundGraphs&) = delete;
  RoundGraphs& operator=(const RoundGraphs&) = delete;

  // Batch, nodes to verify, KV bucket (no slot has more rows).
  using Size = std::tuple<int64_t, int64_t, int64_t>;

  // Adds the graphs of rounds of this size, which run one after another; their memsets become kernels. The memory that
  // they use must stay where it is.
  void add(const Size& size, const std::vector<CUgraph_st*>& graphs);
  // Destroys all graphs. None may be running.
  void clear();
  // Launches the graphs of this batch and number of nodes with the smallest sufficient KV bucket: all of them, the
  // first, or the rest. Returns false if there are none.
  enum class Part { kAll, kFirst, kRest };
  bool launch(const Size& size, Part part = Part::kAll);
  // Returns whether the stream has work left. Throws if it failed.
  bool busy() const;

 private:
  CUstream_st* stream_;
  int device_ = 0;
  std::map<Size, std::vector<CUgraphExec_st*>> graphs_;
};

}  // namespace specdec::scheduler
