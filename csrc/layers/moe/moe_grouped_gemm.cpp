#include "layers/moe/moe_grouped_gemm.h"

#include <algorithm>
#include <vector>

#include "core/bytes.h"
#include "layers/activation/silu_and_mul.h"
#include "layers/gemm/small_m_gemm.h"

namespace specdec::layers {

void moe_grouped_gemm(CallStream stream, const TensorView& x, const TensorView& weight, const TensorView& sorted_pairs,
                      const TensorView& expert_ends, const OptTensor& x_scales, const OptTensor& weight_scales,
                      const OptTensor& shared_weight, bool gated, bool routing_ready, const TensorView& out) {
  Check check("moe_grouped_gemm");
  Dim T{"rows"}, M{"pairs"}, E{"experts"}, K{"in_features"}, G{"groups"};
  Dim W{gated ? "2 * out_features" : "out_features"}, N{"out_features"};
  const bool is_fp8 = x_scales.has_value(), scaled = weight_scales.has_value();
  check.that(scaled || !is_fp8, "weight_scales", "is None", "a tensor with x_scales");
  check.strided("x", x, {T, K}, is_fp8 ? kFloat8 : kFloat16 | kBFloat16);
  const int64_t in_multiple = scaled ? kWeightGroup : 64;
  check.range("in_features", K, in_multiple, INT32_MAX);
  check.that(K % in_multiple == 0, "in_features", {"is ", K}, {"a multiple of ", in_multiple});
  check.tensor("weight", weight, {E, W, K}, scaled ? kFloat8 : dtype_of(x));
  check.range("experts", E, 1, kMaxExperts);
  check.range(W.name, W, 1, INT32_MAX);
  check.that(W % 16 == 0, W.name, {"is ", W}, "a multiple of 16");
  for (const auto& [name, tensor] : {std::pair{"x", &x}, {"weight", &weight}})
    check.that(copy_unit({tensor}) == 16, name, "has rows off 16 bytes", "rows that start on 16 bytes");
  check.tensor("sorted_pairs", sorted_pairs, {M}, kInt64);
  check.range("pairs", M, 0, kMaxSmallMRows);
  check.that(T > 0 ? M % T == 0 : M == 0, "pairs", {"is ", M}, {"a multiple of ", T});
  Dim S{"num_shared", 0}, A{"experts", E};
  if (shared_weight) {
    check.that(!scaled, "shared_weight", "is given", "none with weight_scales");
    Dim R{"rows"}, C{"columns"};
    check.strided("shared_weight", *shared_weight, {R, C}, dtype_of(x));
    S.value = std::max<int64_t>(1, gated ? R / W : C / K);
    Dim outs{gated ? "num_shared * 2 * out_features" : "out_features", gated ? S * W : W};
    Dim ins{gated ? "in_features" : "num_shared * in_features", gated ? K : S * K};
    check.strided("shared_weight", *shared_weight, {outs, ins}, dtype_of(x));
    check.that(copy_unit({&*shared_weight}) == 16, "shared_weight", "has rows off 16 bytes",
               "rows that start on 16 bytes");
    A = Dim{"experts + num_shared", E + S};
    check.range(A.name, A, 1, kMaxExperts);
  }
  check.tensor("expert_ends", expert_ends, {A}, kInt32);
  if (is_fp8) check.strided("x_scales", *x_scales, {G, T}, kFloat32);
  if (scaled) {
    check.tensor("weight_scales", *weight_scales, {E, G, W}, kFloat32);
    check.that(G == 1 || G == K / kWeightGroup, "groups", {"is ", G}, {"1 or ", K / kWeightGroup});
  }
  N.value = gated ? W / 2 : W;
  check.strided_output("out", out, {M, N}, is_fp8 ? kFloat16 | kBFloat16 : dtype_of(x));
  if (M == 0) return;

  const MoeGroupedGemmParams params{
      .x = x.data<void>(),
      .weight = weight.data<void>(),
      .shared_weight = data_or_null<void>(shared_weight),
      .sorted_pairs = sorted_pairs.data<int64_t>(),
      .expert_ends = expert_ends.data<int32_t>(),
      .x_scales = data_or_null<float>(x_scales),
      .weight_scales = data_or_null<float>(weight_scales),
      .out = out.data<void>(),
      .rows = T,
      .pairs = M,
      .experts = E,
      .num_shared = S,
      .in = K,
      .outs = N,
      .groups = scaled ? G.value : 1,
      .x_stride = x.stride(0),
      .x_scales_stride = is_fp8 ? x_scales->stride(0) : 0,
      .shared_stride = shared_weight ? shared_weight->stride(0) : 0,
      .out_stride = out.stride(0),
      .dtype = dtype_of(out),
      .gated = gated,
      .routing_ready = routing_ready,
  };
  SD_DISPATCH(check, stream, moe_grouped_gemm, params);
}

namespace {

// X, W, T: element types of x, weight and out. Each weight row is converted once for all pairs of its expert.
template <class T, class X, class W>
void multiply(const MoeGroupedGemmParams& p) {
  const int64_t size = p.in / p.groups, top_k = p.pairs / p.rows;
  std::vector<float> weight_row(static_cast<size_t>(p.in));
  for (int64_t expert = 0; expert < p.all_experts(); ++expert) {
    const int64_t begin = p.begin(expert), end = p.begin(expert + 1);
    if (begin >= end) continue;
    const ExpertWeight<W> of_expert = p.weight_of<W>(expert);
    std::vector<float> products(static_cast<size_t>((end - begin) * p.weight_rows()));
    for (int64_t n = 0; n < p.weight_rows(); ++n) {
      const int64_t at = n < p.outs ? n : n - p.outs + of_expert.up_distance;
      const W* const weight = of_expert.data + at * of_expert.stride;
      for (int64_t k = 0; k < p.in; ++k) weight_row[static_cast<size_t>(k)] = to_float(weight[k]);
      for (int64_t place = begin; place < end; ++place) {
        const int64_t row = p.pair(place) / top_k;
        const X* const x = static_cast<const X*>(p.x) + row * p.x_stride;
        float total = 0;
        for (int64_t g = 0; g < p.groups; ++g) {
          float sum = 0;
          for (int64_t k = g * size; k < (g + 1) * size; ++k)
            sum += to_float(x[k]) * weight_row[static_cast<size_t>(k)];
          const float x_scale = p.x_scales ? p.x_scales[g * p.x_scales_stride + row] : 1;
          const float weight_scale =
              p.weight_scales ? p.weight_scales[(expert * p.groups + g) * p.weight_rows() + n] : 1;
          total += sum * (x_scale * weight_scale);
        }
        products[static_cast<size_t>((place - begin) * p.weight_rows() + n)] = total;
      }
    }
    for (int64_t place = begin; place < end; ++place) {
      T* const out = static_cast<T*>(p.out) + p.pair(place) * p.out_stride;
      const float* const pair_products = products.data() + (place - begin) * p.weight_rows();
      for (int64_t n = 0; n < p.outs; ++n)
        out[n] = from_float<T>(p.gated ? silu_mul(pair_products[n], pair_products[p.outs + n]) : pair_products[n]);
    }
  }
}

}  // namespace

void moe_grouped_gemm_cpu(const MoeGroupedGemmParams& p) {
  const auto of_type = [&]<class T>() {
    if (!p.weight_scales) return multiply<T, T, T>(p);
    p.x_scales ? multiply<T, Float8, Float8>(p) : multiply<T, T, Float8>(p);
  };
  p.dtype == kBFloat16 ? of_type.template operator()<BFloat16>() : of_type.template operator()<Half>();
}

}  // namespace specdec::layers
