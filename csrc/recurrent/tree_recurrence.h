// tree_recurrence and commit_recurrence: linear recurrences (gated delta rule, KDA, Mamba 2) of all nodes of a tree
// from one committed state.
//
// In a head with state S [value_dim, key_dim] and parent p(i) of node i:
//
//   S_i = e^{g_i} S_p(i) + u_i k_i^T     u_i = beta_i (v_i - e^{g_i} S_p(i) k_i)     o_i = S_i q_i
//
// Without the delta rule u_i is beta_i v_i, and without beta v_i.
//
// With G_i the sum of g along the path to i, i included, everything follows from the committed state S0:
//
//   u_i = beta_i (v_i - e^{G_i} S0 k_i - sum over ancestors j of e^{G_i - G_j} (k_i . k_j) u_j)
//   o_i = e^{G_i} S0 q_i + sum over ancestors j, and i, of e^{G_i - G_j} (q_i . k_j) u_j
//
// A node's record is k_i, u_i and G_i. A path is folded by S = e^{G_last} S0 + sum over its nodes of
// e^{G_last - G_j} u_j k_j^T. All exponents are differences along a path, so at most 0.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"
#include "recurrent/pending.h"

namespace specdec::recurrent {

constexpr int64_t kMaxHeadDim = 256;

// State and records of one layer.
struct RecurrentLayer {
  float* state;      // [num_slots, value_heads, value_dim, key_dim]
  float* k_records;  // [2, num_slots, record_nodes, key_heads, key_dim]
  float* u_records;  // [2, num_slots, record_nodes, value_heads, value_dim]
  float* g_records;  // [2, num_slots, record_nodes, value_heads], or [..., key_dim] by channel
  int64_t key_heads, value_heads, key_dim, value_dim;
  bool by_channel;  // KDA: a decay per channel of the key

  SD_HD int64_t decays() const { return by_channel ? key_dim : 1; }
  SD_HD int64_t key_head(int64_t h) const { return h / (value_heads / key_heads); }
  SD_HD int64_t state_start(int64_t slot, int64_t h) const { return (slot * value_heads + h) * value_dim * key_dim; }
  SD_HD int64_t k_start(int64_t record, int64_t h) const { return (record * key_heads + key_head(h)) * key_dim; }
  SD_HD int64_t u_start(int64_t record, int64_t h) const { return (record * value_heads + h) * value_dim; }
  SD_HD int64_t g_start(int64_t record, int64_t h) const { return (record * value_heads + h) * decays(); }
};

// Strides in elements. The last dimension is contiguous.
struct HeadStrides {
  int64_t row, head;
};

struct TreeRecurrenceParams {
  PendingPathsView pending;
  PackedRowsView rows;
  RecurrentLayer layer;
  const void *q, *k;  // [rows, key_heads, key_dim]
  const void* v;      // [rows, value_heads, value_dim]
  void* out;          // shape of v
  Dtypes dtype;       // of q, k, v and out
  HeadStrides q_strides, k_strides, v_strides, out_strides;
  const float* g;  // [rows, value_heads], or [rows, value_heads, key_dim] by channel
  HeadStrides g_strides;
  const float* beta;  // [rows, value_heads], or null
  int64_t beta_stride;
  bool delta_rule;  // false if beta is null
  float scale;      // of q
  bool normalizes;  // q and k are divided by sqrt(their sum of squares + l2norm_eps)
  float l2norm_eps;
  bool aligned_rows;    // 4 elements of a row of q and k are one aligned load
  bool aligned_state;   // the same for state and records of k, and g by channel
  bool aligned_values;  // the same for v
  bool paired_values;   // 2 elements from an even one on of a row of out and of records of u are one aligned store
};

struct CommitRecurrenceParams {
  PendingPathsView pending;
  RecurrentLayer layer;
  bool aligned_state;
};

void tree_recurrence(CallStream stream, const TensorView& q, const TensorView& k, const TensorView& v,
                     const TensorView& g, const OptTensor& beta, const TensorView& state, const TensorView& records_k,
                     const TensorView& records_u, const TensorView& records_g, const TensorView& path_nodes,
                     const TensorView& num_nodes, const TensorView& parity, const TensorView& prefix_lens,
                     const TensorView& cu_seqlens, const OptTensor& mask, const OptTensor& slots,
                     std::optional<double> scale, std::optional<double> l2norm_eps, bool delta_rule,
                     const TensorView& out, const OptTensor& status);

void commit_recurrence(CallStream stream, const TensorView& state, const TensorView& records_k,
                       const TensorView& records_u, const TensorView& records_g, const TensorView& path_nodes,
                       const TensorView& num_nodes, const TensorView& parity, const OptTensor& slots,
                       const OptTensor& status);

void tree_recurrence_cpu(const TreeRecurrenceParams& p);
void tree_recurrence_cuda(const TreeRecurrenceParams& p, Stream stream);
void commit_recurrence_cpu(const CommitRecurrenceParams& p);
void commit_recurrence_cuda(const CommitRecurrenceParams& p, Stream stream);

}  // namespace specdec::recurrent
