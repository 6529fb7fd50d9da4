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
};

struct CommitConv1dParams {
  PendingPathsView pending;
  ConvLayer layer;
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

// Store the window that a chain leaves: the last taps - 1 of `before` and the chain's inputs.
template <class T>
SD_HD void store_window_after_chain(const TreeConv1dParams& p, const Request& request, int64_t channel,
                                    const T* before) {
  const int64_t size = p.layer.taps - 1;
  T* window = static_cast<T*>(p.layer.window) + request.path.slot * size * p.layer.channels + channel;
  const T* x = static_cast<const T*>(p.x) + request.first * p.x_stride + channel;
  SD_UNROLL
  for (int from = 0; from < kMaxTaps - 1; ++from) {  // before[from] moves to the front by the number of rows
    const int64_t to = from - static_cast<int64_t>(request.rows);
    if (from < size && to >= 0) window[to * p.layer.channels] = before[from];
  }
  for (int64_t t = size > request.rows ? size - request.rows : 0; t < size; ++t)
    window[t * p.layer.channels] = x[(request.rows - size + t) * p.x_stride];
}

// Return the output of row i of a request in a channel. `window` holds the taps - 1 inputs before the rows, `ancestors`
// the nodes that row i sees; a chain gives low_bits(i) for its last rows.
template <class T>
SD_HD float convolve(const TreeConv1dParams& p, const Request& request, int32_t i, int64_t channel, const T* window,
                     const float* weight, float bias) {
  const int taps = static_cast<int>(p.layer.taps);
  const T* x = static_cast<const T*>(p.x) + request.first * p.x_stride + channel;
  uint64_t ancestors = p.rows.mask ? mask_word(p.rows, request, i) & low_bits(i) : 0;
  int64_t node = i;
  int outside = 0;  // taps before the request's rows
  float sum = bias;
  SD_UNROLL
  for (int t = 0; t < kMaxTaps; ++t) {
    if (t >= taps) break;
    float tap = 0;
    if (node >= 0) {
      tap = to_float(x[node * p.x_stride]);
      if (p.rows.mask == nullptr) {
        --node;
      } else if (ancestors == 0) {
        node = -1;
      } else {
        node = highest_bit(ancestors);
        ancestors ^= own_bit(node, 0);
      }
    } else {
      ++outside;
      SD_UNROLL
      for (int w = 0; w < kMaxTaps - 1; ++w)  // window[taps - 1 - outside], without an index into registers
        if (w == taps - 1 - outside) tap = to_float(window[w]);
    }
    sum += weight[t] * tap;
  }
  return p.silu ? sum / (1 + expf(-sum)) : sum;
}

// Load a channel's weights, the node's own first, and return its bias.
template <class T>
SD_HD float load_weight(const TreeConv1dParams& p, int64_t channel, float* weight) {
  const T* from = static_cast<const T*>(p.weight) + channel * p.layer.taps;
  SD_UNROLL
  for (int t = 0; t < kMaxTaps; ++t) weight[t] = t < p.layer.taps ? to_float(from[p.layer.taps - 1 - t]) : 0;
  return p.bias ? to_float(static_cast<const T*>(p.bias)[channel]) : 0;
}

}  // namespace specdec::recurrent
