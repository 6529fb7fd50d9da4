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
  // The graphs are made on the current device, for this stream.
  explicit RoundGraphs(CUstream_st* stream);
  ~RoundGraphs();
  RoundGraphs(const RoundGraphs&) = delete;
  RoundGraphs& operator=(const RoundGraphs&) = delete;

  // Batch, nodes to verify, KV rows that no slot exceeds.
  using Size = std::tuple<int64_t, int64_t, int64_t>;

  // The graphs of rounds of this size, which run one behind the other; their memsets become kernels. What they read and
  // write must stay where it is.
  void add(const Size& size, const std::vector<CUgraph_st*>& graphs);
  // Forgets all of them. None of them runs.
  void clear();
  // Launches the graphs of this batch and so many nodes for the least KV that is enough: all of them, or the first, or
  // those behind it. False where there are none.
  enum class Part { kAll, kFirst, kRest };
  bool launch(const Size& size, Part part = Part::kAll);
  // Whether the stream has work left. Throws where it failed.
  bool busy() const;

 private:
  CUstream_st* stream_;
  int device_ = 0;
  std::map<Size, std::vector<CUgraphExec_st*>> graphs_;
};

}  // namespace specdec::scheduler
