#include "recurrent/tree_conv1d.h"

#include <algorithm>

#include "core/bytes.h"

namespace specdec::recurrent {
namespace {

bool is_aligned(const TensorView& t) { return reinterpret_cast<uintptr_t>(bytes(t)) % 16 == 0; }

struct ConvDims : PendingDims {
  Dim C{"channels"}, K{"taps"}, size{"taps - 1"};

  ConvLayer check_layer(Check& check, const TensorView& window, const TensorView& records) {
    check.output("window", window, {slots, size, C}, kFloats);
    check.output("records", records, {2, slots, nodes, C}, dtype_of(window));
    check.range("num_nodes", nodes, 1, kMaxNodes);
    check.range("taps", size + 1, 2, kMaxTaps);
    check.range("channels", C, 0, INT32_MAX);
    return {.window = window.data<void>(),
            .records = records.data<void>(),
            .dtype = dtype_of(window),
            .channels = C,
            .taps = size + 1};
  }
};

// Store the window that a chain leaves: the last taps - 1 of `before` and the chain's inputs.
template <class T>
void store_window_after_chain(const TreeConv1dParams& p, const Request& request, int64_t channel, const T* before) {
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
float convolve(const TreeConv1dParams& p, const Request& request, int32_t i, int64_t channel, const T* window,
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
float load_weight(const TreeConv1dParams& p, int64_t channel, float* weight) {
  const T* from = static_cast<const T*>(p.weight) + channel * p.layer.taps;
  SD_UNROLL
  for (int t = 0; t < kMaxTaps; ++t) weight[t] = t < p.layer.taps ? to_float(from[p.layer.taps - 1 - t]) : 0;
  return p.bias ? to_float(static_cast<const T*>(p.bias)[channel]) : 0;
}

}  // namespace

void tree_conv1d(CallStream stream, const TensorView& x, const TensorView& weight, const OptTensor& bias,
                 const TensorView& window, const TensorView& records, const TensorView& path_nodes,
                 const TensorView& num_nodes, const TensorView& parity, const TensorView& prefix_lens,
                 const TensorView& cu_seqlens, const OptTensor& mask, const OptTensor& slots,
                 const std::optional<std::string>& activation, const TensorView& out, const OptTensor& status) {
  Check check("tree_conv1d");
  Dim M{"rows"}, B{"batch"}, W{"mask_words"};
  ConvDims n;
  check.strided("x", x, {M, n.C}, kFloats);
  check.tensor("weight", weight, {n.C, n.K}, dtype_of(x));
  check.range("taps", n.K, 2, kMaxTaps);
  n.size.value = n.K - 1;
  check.tensor("bias", bias, {n.C}, dtype_of(x));
  check.that(dtype_of(window) == dtype_of(x), "window", {"is ", window.dl.dtype}, x.dl.dtype);
  const ConvLayer layer = n.check_layer(check, window, records);
  n.check_paths(check, path_nodes, num_nodes, parity);
  check_rows(check, n, M, B, W, prefix_lens, cu_seqlens, mask, slots, status);
  if (activation) check.that(*activation == "silu", "activation", {"is ", *activation}, "None or silu");
  check.strided_output("out", out, {M, n.C}, dtype_of(x));
  if (M == 0 || n.C == 0) return;

  const TreeConv1dParams params{
      .pending = n.view(path_nodes, num_nodes, parity, slots, status, B),
      .rows = rows_view(prefix_lens, cu_seqlens, mask, M, W),
      .layer = layer,
      .x = x.data<void>(),
      .weight = weight.data<void>(),
      .bias = data_or_null<const void>(bias),
      .out = out.data<void>(),
      .x_stride = x.stride(0),
      .out_stride = out.stride(0),
      .silu = activation.has_value(),
      .vectorized =
          is_aligned(weight) && (!bias || is_aligned(*bias)) && copy_unit({&x, &window, &records, &out}) == 16,
  };
  SD_DISPATCH(check, stream, tree_conv1d, params);
}

void commit_conv1d(CallStream stream, const TensorView& window, const TensorView& records, const TensorView& path_nodes,
                   const TensorView& num_nodes, const TensorView& parity, const OptTensor& slots,
                   const OptTensor& status) {
  Check check("commit_conv1d");
  Dim B{"batch"};
  ConvDims n;
  const ConvLayer layer = n.check_layer(check, window, records);
  n.check_paths(check, path_nodes, num_nodes, parity);
  if (!slots) B.value = n.slots;
  check.slots(slots, B, n.slots);
  check.output("status", status, {n.slots}, kInt32);
  if (B == 0 || n.C == 0) return;

  const CommitConv1dParams params{
      .pending = n.view(path_nodes, num_nodes, parity, slots, status, B),
      .layer = layer,
      .vectorized = copy_unit({&window, &records}) == 16,
  };
  SD_DISPATCH(check, stream, commit_conv1d, params);
}

void tree_conv1d_cpu(const TreeConv1dParams& p) {
  with_float_type(p.layer.dtype, [&]<class T>() {
    T* out = static_cast<T*>(p.out);
    const T* x = static_cast<const T*>(p.x);
    for (int64_t b = 0; b <= p.pending.batch; ++b) {
      const Request request = load_request(p.pending, p.rows, b);
      const int32_t slot = request.path.slot;
      int32_t bits = request.path.bits;
      if (slot >= 0 && bits == 0) bits = bad_tree_bits(p.pending, &p.rows, request.path, &request);
      if (bits) set_status(p.pending.status, slot, bits);
      if (slot < 0 || bits) {
        for (int32_t i = 0; i < request.rows; ++i)
          std::fill_n(out + (request.first + i) * p.out_stride, p.layer.channels, T{});
        continue;
      }
      if (request.rows == 0) continue;
      for (int64_t c = 0; c < p.layer.channels; ++c) {
        T window[kMaxTaps - 1];
        float weight[kMaxTaps];
        const float bias = load_weight<T>(p, c, weight);
        load_window(p.pending, p.layer, request.path, request.is_fresh, c, window);
        for (int32_t i = 0; i < request.rows; ++i)
          out[(request.first + i) * p.out_stride + c] = from_float<T>(convolve(p, request, i, c, window, weight, bias));
        if (p.rows.mask == nullptr)
          store_window_after_chain(p, request, c, window);
        else
          store_window(p.layer, slot, c, window);
      }
      if (p.rows.mask == nullptr) continue;
      T* records =
          static_cast<T*>(p.layer.records) + first_record(p.pending, 1 - request.path.buffer, slot) * p.layer.channels;
      for (int64_t i = 0; i < request.rows; ++i)
        std::copy_n(x + (request.first + i) * p.x_stride, p.layer.channels, records + i * p.layer.channels);
    }
  });
}

void commit_conv1d_cpu(const CommitConv1dParams& p) {
  with_float_type(p.layer.dtype, [&]<class T>() {
    for (int64_t b = 0; b < p.pending.batch; ++b) {
      const PendingPath path = load_pending(p.pending, b);
      if (path.slot < 0) continue;
      const int32_t bits = path.bits ? path.bits : bad_tree_bits(p.pending, nullptr, path, nullptr);
      if (bits) set_status(p.pending.status, path.slot, bits);
      if (bits || path.count == 0) continue;
      for (int64_t c = 0; c < p.layer.channels; ++c) {
        T window[kMaxTaps - 1];
        load_window(p.pending, p.layer, path, false, c, window);
        store_window(p.layer, path.slot, c, window);
      }
    }
  });
}

}  // namespace specdec::recurrent
