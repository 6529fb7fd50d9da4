// Rounds as CUDA graphs: captured by torch, instantiated here, launched without Python.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

struct CUgraph_st;  // cudaGraph_t and cudaGraphExec_t are pointers to these
struct CUgraphExec_st;
struct CUstream_st;

namespace specdec::scheduler {

class RoundGraphs {
 public:
  // On the device that is current, for this stream.
  explicit RoundGraphs(CUstream_st* stream);
  ~RoundGraphs();
  RoundGraphs(const RoundGraphs&) = delete;
  RoundGraphs& operator=(const RoundGraphs&) = delete;

  // The graph of rounds of `batch` rows with trees of `num_nodes`; its memsets become kernels. What it reads and writes
  // must stay where it is.
  void add(int64_t batch, int64_t num_nodes, CUgraph_st* graph);
  // False where there is no such graph.
  bool launch(int64_t batch, int64_t num_nodes);
  // Whether the stream has work left. Throws where it failed.
  bool busy() const;

 private:
  CUstream_st* stream_;
  int device_ = 0;
  std::map<std::pair<int64_t, int64_t>, CUgraphExec_st*> graphs_;
};

}  // namespace specdec::scheduler
