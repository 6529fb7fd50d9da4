// tree_recurrence and commit_recurrence: argument checks and dispatch.
#include "recurrent/tree_recurrence.h"

#include "core/bytes.h"

namespace specdec::recurrent {
namespace {

HeadStrides head_strides(const TensorView& t) { return {t.stride(0), t.ndim() > 2 ? t.stride(1) : 1}; }

// Return whether 4 elements from any multiple of 4 in the last dimension are one aligned load.
bool loads_by_four(const TensorView& t) { return copy_unit({&t}) >= 4 * item_bytes(t); }

struct LayerDims : PendingDims {
  Dim Hk{"key_heads"}, Hv{"value_heads"}, dk{"key_dim"}, dv{"value_dim"};

  RecurrentLayer check_layer(Check& check, const TensorView& state, const TensorView& k, const TensorView& u,
                             const TensorView& g) {
    const bool by_channel = g.ndim() == 5;
    check.output("state", state, {slots, Hv, dv, dk}, kFloat32);
    check.output("records.k", k, {2, slots, nodes, Hk, dk}, kFloat32);
    check.output("records.u", u, {2, slots, nodes, Hv, dv}, kFloat32);
    if (by_channel)
      check.output("records.g", g, {2, slots, nodes, Hv, dk}, kFloat32);
    else
      check.output("records.g", g, {2, slots, nodes, Hv}, kFloat32);
    check.range("num_nodes", nodes, 1, kMaxNodes);
    check.range("key_dim", dk, 1, kMaxHeadDim);
    check.range("value_dim", dv, 1, kMaxHeadDim);
    check.that(Hk >= 1 && Hv >= 1 && Hv % Hk == 0, "records.k", {"has ", Hk, " heads for the ", Hv, " of records.u"},
               "a number of heads that divides it");
    return {.state = state.data<float>(),
            .k_records = k.data<float>(),
            .u_records = u.data<float>(),
            .g_records = g.data<float>(),
            .key_heads = Hk,
            .value_heads = Hv,
            .key_dim = dk,
            .value_dim = dv,
            .by_channel = by_channel};
  }
};

bool is_aligned(const RecurrentLayer& layer, const TensorView& state, const TensorView& k, const TensorView& g) {
  return loads_by_four(state) && loads_by_four(k) && (!layer.by_channel || loads_by_four(g));
}

}  // namespace

void tree_recurrence(CallStream stream, const TensorView& q, const TensorView& k, const TensorView& v,
                     const TensorView& g, const OptTensor& beta, const TensorView& state, const TensorView& records_k,
                     const TensorView& records_u, const TensorView& records_g, const TensorView& path_nodes,
                     const TensorView& num_nodes, const TensorView& parity, const TensorView& prefix_lens,
                     const TensorView& cu_seqlens, const OptTensor& mask, const OptTensor& slots,
                     std::optional<double> scale, std::optional<double> l2norm_eps, bool delta_rule,
                     const TensorView& out, const OptTensor& status) {
  Check check("tree_recurrence");
  Dim M{"rows"}, B{"batch"}, W{"mask_words"};
  LayerDims n;
  check.strided("q", q, {M, n.Hk, n.dk}, kFloats);
  const Dtypes dtype = dtype_of(q);
  check.strided("k", k, {M, n.Hk, n.dk}, dtype);
  check.strided("v", v, {M, n.Hv, n.dv}, dtype);
  const RecurrentLayer layer = n.check_layer(check, state, records_k, records_u, records_g);
  if (layer.by_channel)
    check.strided("g", g, {M, n.Hv, n.dk}, kFloat32);
  else
    check.strided("g", g, {M, n.Hv}, kFloat32);
  if (beta) check.strided("beta", *beta, {M, n.Hv}, kFloat32);
  n.check_paths(check, path_nodes, num_nodes, parity);
  check_rows(check, n, M, B, W, prefix_lens, cu_seqlens, mask, slots, status);
  const float factor = scale ? check.factor("scale", *scale) : 1;
  const float eps = l2norm_eps ? check.factor("l2norm_eps", *l2norm_eps) : 0;
  check.strided_output("out", out, {M, n.Hv, n.dv}, dtype);
  if (M == 0) return;

  const TreeRecurrenceParams params{
      .pending = n.view(path_nodes, num_nodes, parity, slots, status, B),
      .rows = rows_view(prefix_lens, cu_seqlens, mask, M, W),
      .layer = layer,
      .q = q.data<void>(),
      .k = k.data<void>(),
      .v = v.data<void>(),
      .out = out.data<void>(),
      .dtype = dtype,
      .q_strides = head_strides(q),
      .k_strides = head_strides(k),
      .v_strides = head_strides(v),
      .out_strides = head_strides(out),
      .g = g.data<float>(),
      .g_strides = head_strides(g),
      .beta = data_or_null<const float>(beta),
      .beta_stride = beta ? beta->stride(0) : 0,
      .delta_rule = delta_rule && beta,
      .scale = factor,
      .normalizes = l2norm_eps.has_value(),
      .l2norm_eps = eps,
      .aligned_rows = loads_by_four(q) && loads_by_four(k),
      .aligned_state = is_aligned(layer, state, records_k, records_g) && (!layer.by_channel || loads_by_four(g)),
      .aligned_values = loads_by_four(v),
      .paired_values = copy_unit({&out}) >= 2 * item_bytes(out) && copy_unit({&records_u}) >= 8,
  };
  SD_DISPATCH(check, stream, tree_recurrence, params);
}

void commit_recurrence(CallStream stream, const TensorView& state, const TensorView& records_k,
                       const TensorView& records_u, const TensorView& records_g, const TensorView& path_nodes,
                       const TensorView& num_nodes, const TensorView& parity, const OptTensor& slots,
                       const OptTensor& status) {
  Check check("commit_recurrence");
  Dim B{"batch"};
  LayerDims n;
  const RecurrentLayer layer = n.check_layer(check, state, records_k, records_u, records_g);
  n.check_paths(check, path_nodes, num_nodes, parity);
  if (!slots) B.value = n.slots;
  check.slots(slots, B, n.slots);
  check.output("status", status, {n.slots}, kInt32);
  if (B == 0) return;

  const CommitRecurrenceParams params{
      .pending = n.view(path_nodes, num_nodes, parity, slots, status, B),
      .layer = layer,
      .aligned_state = is_aligned(layer, state, records_k, records_g),
  };
  SD_DISPATCH(check, stream, commit_recurrence, params);
}

}  // namespace specdec::recurrent
