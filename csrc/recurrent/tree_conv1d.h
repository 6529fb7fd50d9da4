// tree_conv1d and commit_conv1d: a causal depthwise convolution over each node's path of a tree.
//
// A node's taps are its own input, its ancestors' inputs (nearest first), then the window: the last width - 1 committed
// inputs of the slot.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"
#include "recurrent/pending.h"

namespace specdec::recurrent {

constexpr int kMaxTaps = 8;

// Window and records of one layer, in the dtype of the inputs.
struct ConvLayer {
  void* window;   // [num_slots, taps - 1, channels], oldest first
  void* records;  // [2, num_slots, record_nodes, channels]
  Dtypes dtype;
  int64_t channels, taps;
};

struct TreeConv1dParams {
  PendingPathsView pending;
  PackedRowsView rows;
  ConvLayer layer;
  const void* x;       // [rows, channels]
  const void* weight;  // [channels, taps]; the last tap is the node's own input
  const void* bias;    // [channels] or null
  void* out;           // [rows, channels]
  int64_t x_stride, out_stride;
  bool silu;
  bool vectorized;  // 16 bytes of adjacent channels are one aligned access, in all tensors
};

struct CommitConv1dParams {
  PendingPathsView pending;
  ConvLayer layer;
  bool vectorized;
};

void tree_conv1d(CallStream stream, const TensorView& x, const TensorView& weight, const OptTensor& bias,
                 const TensorView& window, const TensorView& records, const TensorView& path_nodes,
                 const TensorView& num_nodes, const TensorView& parity, const TensorView& prefix_lens,
                 const TensorView& cu_seqlens, const OptTensor& mask, const OptTensor& slots,
                 const std::optional<std::string>& activation, const TensorView& out, const OptTensor& status);

void commit_conv1d(CallStream stream, const TensorView& window, const TensorView& records, const TensorView& path_nodes,
                   const TensorView& num_nodes, const TensorView& parity, const OptTensor& slots,
                   const OptTensor& status);

void tree_conv1d_cpu(const TreeConv1dParams& p);
void tree_conv1d_cuda(const TreeConv1dParams& p, Stream stream);
void commit_conv1d_cpu(const CommitConv1dParams& p);
void commit_conv1d_cuda(const CommitConv1dParams& p, Stream stream);

// Load the window of a channel after its pending path, oldest first: to[0] to to[taps - 2].
template <class T>
SD_HD void load_window(const PendingPathsView& p, const ConvLayer& layer, const PendingPath& path, bool is_fresh,
                       int64_t channel, T* to) {
  const int64_t size = layer.taps - 1;
  const T* window = static_cast<const T*>(layer.window) + path.slot * size * layer.channels + channel;
  const T* records =
      static_cast<const T*>(layer.records) + first_record(p, path.buffer, path.slot) * layer.channels + channel;
  SD_UNROLL
  for (int t = 0; t < kMaxTaps - 1; ++t) {
    if (t >= size) break;
    const int64_t at = t + path.count;  // in the window, then in the path
    to[t] = at >= size ? records[path.nodes[at - size] * layer.channels] : is_fresh ? T{} : window[at * layer.channels];
  }
}

template <class T>
SD_HD void store_window(const ConvLayer& layer, int64_t slot, int64_t channel, const T* from) {
  const int64_t size = layer.taps - 1;
  T* window = static_cast<T*>(layer.window) + slot * size * layer.channels + channel;
  SD_UNROLL
  for (int t = 0; t < kMaxTaps - 1; ++t) {
    if (t >= size) break;
    window[t * layer.channels] = from[t];
  }
}

}  // namespace specdec::recurrent
