// tree_recurrence and commit_recurrence on the CPU: one value head of one request at a time, with the state transposed
// to [key_dim, value_dim], so that every inner loop runs along a vector.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "recurrent/tree_recurrence.h"

namespace specdec::recurrent {
namespace {

constexpr int64_t kLanes = 8;

// A node on a path: its record.
struct PathNode {
  const float *k, *u, *g;
};
using Path = std::array<PathNode, kMaxNodes>;

// Scratch of one head, kept per thread. Rows of keys are padded with zeros to a multiple of kLanes.
struct Head {
  std::vector<float> state;      // [key_dim, value_dim]
  std::vector<float> q, k;       // [kMaxNodes, padded key_dim]
  std::vector<float> u, values;  // [kMaxNodes, value_dim]
  std::vector<float> g;          // [kMaxNodes, decays]
  std::vector<float> weights;    // [padded key_dim]
  std::array<uint64_t, kMaxNodes> seen;
  int64_t key_stride;

  explicit Head(const RecurrentLayer& layer) { fit(layer); }

  void fit(const RecurrentLayer& layer) {
    key_stride = (layer.key_dim + kLanes - 1) / kLanes * kLanes;
    state.resize(layer.key_dim * layer.value_dim);
    for (auto* rows : {&q, &k}) rows->assign(kMaxNodes * key_stride, 0.0f);
    for (auto* rows : {&u, &values}) rows->resize(kMaxNodes * layer.value_dim);
    g.resize(kMaxNodes * layer.decays());
    weights.assign(key_stride, 0.0f);
  }
};

float dot(const float* a, const float* b, int64_t n) {
  float parts[kLanes] = {};
  for (int64_t d = 0; d < n; d += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) parts[lane] += a[d + lane] * b[d + lane];
  float sum = 0;
  for (float part : parts) sum += part;
  return sum;
}

void add_scaled(float* __restrict to, const float* __restrict from, float factor, int64_t n) {
  for (int64_t v = 0; v < n; ++v) to[v] += factor * from[v];
}

float decay(float later, float earlier) { return std::exp(std::min(later - earlier, 0.0f)); }

void load_state(Head& head, const RecurrentLayer& layer, int64_t slot, int64_t h) {
  const float* state = layer.state + layer.state_start(slot, h);
  for (int64_t v = 0; v < layer.value_dim; ++v)
    for (int64_t d = 0; d < layer.key_dim; ++d) head.state[d * layer.value_dim + v] = state[v * layer.key_dim + d];
}

void store_state(const Head& head, const RecurrentLayer& layer, int64_t slot, int64_t h) {
  float* state = layer.state + layer.state_start(slot, h);
  for (int64_t v = 0; v < layer.value_dim; ++v)
    for (int64_t d = 0; d < layer.key_dim; ++d) state[v * layer.key_dim + d] = head.state[d * layer.value_dim + v];
}

// Fold the first `count` nodes of a path into the state.
void fold(Head& head, const RecurrentLayer& layer, const Path& path, int64_t count) {
  if (count == 0) return;
  const int64_t step = layer.by_channel ? 1 : 0;
  const float* last = path[count - 1].g;
  for (int64_t d = 0; d < layer.key_dim; ++d) {
    float* row = head.state.data() + d * layer.value_dim;
    const float factor = std::exp(last[d * step]);
    for (int64_t v = 0; v < layer.value_dim; ++v) row[v] *= factor;
  }
  for (int64_t j = 0; j < count; ++j) {
    const PathNode& node = path[j];
    float weight = step ? 0 : decay(last[0], node.g[0]);
    for (int64_t d = 0; d < layer.key_dim; ++d) {
      if (step) weight = decay(last[d], node.g[d]);
      add_scaled(head.state.data() + d * layer.value_dim, node.u, node.k[d] * weight, layer.value_dim);
    }
  }
}

void fold_pending(Head& head, const PendingPathsView& p, const RecurrentLayer& layer, const PendingPath& path,
                  int64_t h) {
  Path nodes;
  for (int32_t j = 0; j < path.count; ++j) {
    const int64_t record = first_record(p, path.buffer, path.slot) + path.nodes[j];
    nodes[j] = {layer.k_records + layer.k_start(record, h), layer.u_records + layer.u_start(record, h),
                layer.g_records + layer.g_start(record, h)};
  }
  fold(head, layer, nodes, path.count);
}

// Load a row of q or k, normalized and scaled.
template <class T>
void load_key(const TreeRecurrenceParams& p, const T* from, float scale, float* to) {
  float squares = 0;
  for (int64_t d = 0; d < p.layer.key_dim; ++d) {
    to[d] = to_float(from[d]);
    squares += to[d] * to[d];
  }
  if (p.normalizes) scale *= 1 / std::sqrt(squares + p.l2norm_eps);
  for (int64_t d = 0; d < p.layer.key_dim; ++d) to[d] *= scale;
}

// Load rows first to first + count - 1 of a request, and sum the decays along their paths.
template <class T>
void load_rows(Head& head, const TreeRecurrenceParams& p, const Request& request, int64_t h, int64_t first,
               int64_t count) {
  const RecurrentLayer& layer = p.layer;
  const int64_t decays = layer.decays(), key_head = layer.key_head(h);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = request.first + first + i;
    load_key(p, static_cast<const T*>(p.q) + row * p.q_strides.row + key_head * p.q_strides.head, p.scale,
             head.q.data() + i * head.key_stride);
    load_key(p, static_cast<const T*>(p.k) + row * p.k_strides.row + key_head * p.k_strides.head, 1,
             head.k.data() + i * head.key_stride);
    const T* v = static_cast<const T*>(p.v) + row * p.v_strides.row + h * p.v_strides.head;
    for (int64_t d = 0; d < layer.value_dim; ++d) head.u[i * layer.value_dim + d] = to_float(v[d]);

    head.seen[i] = p.rows.mask ? mask_word(p.rows, request, static_cast<int32_t>(i)) : low_bits(i + 1);
    const uint64_t ancestors = head.seen[i] & low_bits(i);
    const float* own = p.g + row * p.g_strides.row + h * p.g_strides.head;
    const float* parent = ancestors ? head.g.data() + highest_bit(ancestors) * decays : nullptr;
    for (int64_t d = 0; d < decays; ++d) head.g[i * decays + d] = own[d] + (parent ? parent[d] : 0.0f);
  }
}

// Return e^{G_i - G_j} x . k_j, for a row x of q or k of node i.
float pair_product(Head& head, const RecurrentLayer& layer, const float* x, int64_t i, int64_t j) {
  const float* k = head.k.data() + j * head.key_stride;
  const int64_t decays = layer.decays();
  const float *later = head.g.data() + i * decays, *earlier = head.g.data() + j * decays;
  if (!layer.by_channel) return decay(later[0], earlier[0]) * dot(x, k, head.key_stride);
  for (int64_t d = 0; d < layer.key_dim; ++d) head.weights[d] = k[d] * decay(later[d], earlier[d]);
  return dot(x, head.weights.data(), head.key_stride);
}

// Add e^{G_i} S0 x, times `factor`, to a row of values.
void add_state_product(const Head& head, const RecurrentLayer& layer, const float* x, int64_t i, float factor,
                       float* to) {
  const float* g = head.g.data() + i * layer.decays();
  const int64_t step = layer.by_channel ? 1 : 0;
  float weight = factor * std::exp(g[0]);
  for (int64_t d = 0; d < layer.key_dim; ++d) {
    if (step) weight = factor * std::exp(g[d]);
    add_scaled(to, head.state.data() + d * layer.value_dim, x[d] * weight, layer.value_dim);
  }
}

// Compute u and the outputs of the rows that are loaded, parents first.
template <class T>
void compute_rows(Head& head, const TreeRecurrenceParams& p, const Request& request, int64_t h, int64_t first,
                  int64_t count) {
  const RecurrentLayer& layer = p.layer;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = request.first + first + i, width = layer.value_dim;
    const float *q = head.q.data() + i * head.key_stride, *k = head.k.data() + i * head.key_stride;
    float *u = head.u.data() + i * width, *values = head.values.data() + i * width;
    if (p.delta_rule) {
      add_state_product(head, layer, k, i, -1, u);
      for (uint64_t left = head.seen[i] & low_bits(i); left != 0; left &= left - 1) {
        const int64_t j = std::countr_zero(left);
        add_scaled(u, head.u.data() + j * width, -pair_product(head, layer, k, i, j), width);
      }
    }
    if (p.beta) {
      const float beta = p.beta[row * p.beta_stride + h];
      for (int64_t v = 0; v < width; ++v) u[v] *= beta;
    }
    std::fill_n(values, width, 0.0f);
    add_state_product(head, layer, q, i, 1, values);
    for (uint64_t left = head.seen[i]; left != 0; left &= left - 1) {
      const int64_t j = std::countr_zero(left);
      add_scaled(values, head.u.data() + j * width, pair_product(head, layer, q, i, j), width);
    }
    T* out = static_cast<T*>(p.out) + row * p.out_strides.row + h * p.out_strides.head;
    for (int64_t v = 0; v < width; ++v) out[v] = from_float<T>(values[v]);
  }
}

void write_records(const Head& head, const TreeRecurrenceParams& p, const Request& request, int64_t h) {
  const RecurrentLayer& layer = p.layer;
  const int64_t first = first_record(p.pending, 1 - request.path.buffer, request.path.slot);
  for (int64_t i = 0; i < request.rows; ++i) {
    std::copy_n(head.k.data() + i * head.key_stride, layer.key_dim, layer.k_records + layer.k_start(first + i, h));
    std::copy_n(head.u.data() + i * layer.value_dim, layer.value_dim, layer.u_records + layer.u_start(first + i, h));
    std::copy_n(head.g.data() + i * layer.decays(), layer.decays(), layer.g_records + layer.g_start(first + i, h));
  }
}

template <class T>
void run_head(Head& head, const TreeRecurrenceParams& p, const Request& request, int64_t h) {
  const RecurrentLayer& layer = p.layer;
  if (request.is_fresh)
    std::fill(head.state.begin(), head.state.end(), 0.0f);
  else
    load_state(head, layer, request.path.slot, h);
  fold_pending(head, p.pending, layer, request.path, h);
  if (p.rows.mask) {
    load_rows<T>(head, p, request, h, 0, request.rows);
    compute_rows<T>(head, p, request, h, 0, request.rows);
    write_records(head, p, request, h);
  } else {
    Path path;
    for (int64_t i = 0; i < kChunkRows; ++i)
      path[i] = {head.k.data() + i * head.key_stride, head.u.data() + i * layer.value_dim,
                 head.g.data() + i * layer.decays()};
    for (int64_t first = 0; first < request.rows; first += kChunkRows) {
      const int64_t count = std::min<int64_t>(kChunkRows, request.rows - first);
      load_rows<T>(head, p, request, h, first, count);
      compute_rows<T>(head, p, request, h, first, count);
      fold(head, layer, path, count);
    }
  }
  store_state(head, layer, request.path.slot, h);
}

template <class T>
void zero_rows(const TreeRecurrenceParams& p, const Request& request) {
  for (int64_t i = 0; i < request.rows; ++i)
    for (int64_t h = 0; h < p.layer.value_heads; ++h)
      std::fill_n(static_cast<T*>(p.out) + (request.first + i) * p.out_strides.row + h * p.out_strides.head,
                  p.layer.value_dim, T{});
}

Head& scratch_for(const RecurrentLayer& layer) {
  thread_local Head head(layer);
  head.fit(layer);
  return head;
}

}  // namespace

void tree_recurrence_cpu(const TreeRecurrenceParams& p) {
  Head& head = scratch_for(p.layer);
  with_float_type(p.dtype, [&]<class T>() {
    for (int64_t b = 0; b <= p.pending.batch; ++b) {
      const Request request = load_request(p.pending, p.rows, b);
      const int32_t slot = request.path.slot;
      int32_t bits = request.path.bits;
      if (slot >= 0 && bits == 0) bits = bad_tree_bits(p.pending, &p.rows, request.path, &request);
      if (bits) set_status(p.pending.status, slot, bits);
      if (slot < 0 || bits) {
        zero_rows<T>(p, request);
      } else if (request.rows > 0) {
        for (int64_t h = 0; h < p.layer.value_heads; ++h) run_head<T>(head, p, request, h);
      }
    }
  });
}

void commit_recurrence_cpu(const CommitRecurrenceParams& p) {
  Head& head = scratch_for(p.layer);
  for (int64_t b = 0; b < p.pending.batch; ++b) {
    const PendingPath path = load_pending(p.pending, b);
    if (path.slot < 0) continue;
    const int32_t bits = path.bits ? path.bits : bad_tree_bits(p.pending, nullptr, path, nullptr);
    if (bits) set_status(p.pending.status, path.slot, bits);
    if (bits || path.count == 0) continue;
    for (int64_t h = 0; h < p.layer.value_heads; ++h) {
      load_state(head, p.layer, path.slot, h);
      fold_pending(head, p.pending, p.layer, path, h);
      store_state(head, p.layer, path.slot, h);
    }
  }
}

}  // namespace specdec::recurrent
