#include "layers/gemm/small_m_gemm.h"

#include <algorithm>

#include "core/bytes.h"
#include "layers/activation/silu_and_mul.h"

namespace specdec::layers {
namespace {

GemmShape shape_of(const TensorView& x, const TensorView& weight, bool gated) {
  const Dtypes dtype = dtype_of(x), weight_dtype = dtype_of(weight);
  const int64_t ins = weight.shape(1) * (weight_dtype == kUInt8 ? 2 : 1), rows = x.numel() / std::max<int64_t>(ins, 1);
  const bool one_row = x.ndim() == 1 || x.shape(static_cast<int>(x.ndim()) - 2) == 1;
  const bool is_half = dtype == kFloat16 || dtype == kBFloat16, is_fp8 = weight_dtype == kFloat8;
  return {
      .rows = rows,
      .outs = weight.shape(0),
      .ins = ins,
      .bits = is_fp8 && (is_half || dtype == kFloat8) ? 8
              : is_half && weight_dtype == kUInt8     ? 4
              : is_half && dtype == weight_dtype      ? 16
                                                      : 32,
      .gated = gated,
      .overlaps = (!one_row && !is_fp8 && x.stride(static_cast<int>(x.ndim()) - 2) < ins) ||
                  (weight.shape(0) > 1 && weight.stride(0) < weight.shape(1)),
  };
}

// Return whether every row of a 2-D tensor starts on 16 bytes.
bool starts_on_16_bytes(const TensorView& t) {
  const auto at = reinterpret_cast<uintptr_t>(bytes(t));
  return at % 16 == 0 && (t.shape(0) < 2 || byte_stride(t, 0) % 16 == 0);
}

}  // namespace

void small_m_gemm(CallStream stream, const TensorView& x, const TensorView& weight, const OptTensor& bias,
                  const OptTensor& x_scales, const OptTensor& weight_scales, bool gated,
                  const std::optional<std::string>& plan, const TensorView& out) {
  Check check("small_m_gemm");
  Dim M{"rows"}, K{"in_features"}, W{gated ? "2 * out_features" : "out_features"}, N{"out_features"}, G{"groups"};
  const bool is_fp8 = x_scales.has_value(), scaled = weight_scales.has_value(), is_int4 = scaled && !is_fp8;
  check.that(scaled || !is_fp8, "weight_scales", "is None", "a tensor with x_scales");
  check.strided("x", x, {M, K}, is_fp8 ? kFloat8 : kFloat16 | kBFloat16);
  check.range("rows", M, 0, kMaxSmallMRows);
  check.range("in_features", K, 64, INT32_MAX);
  const int64_t in_multiple = is_fp8 ? kWeightGroup : is_int4 ? 2 * kWeightGroup : 64;
  check.that(K % in_multiple == 0, "in_features", {"is ", K}, {"a multiple of ", in_multiple});
  Dim in_bytes{"in_features / 2", K / 2};
  check.strided("weight", weight, {W, is_int4 ? in_bytes : K}, is_int4 ? kUInt8 : dtype_of(x));
  check.range(W.name, W, 1, INT32_MAX);
  check.that(!(gated || scaled) || W % 16 == 0, W.name, {"is ", W}, "a multiple of 16");
  for (const auto& [name, tensor] : {std::pair{"x", &x}, {"weight", &weight}})
    check.that(copy_unit({tensor}) == 16, name, "has rows off 16 bytes", "rows that start on 16 bytes");
  N.value = gated ? W / 2 : W;
  check.strided_output("out", out, {M, N},
                       is_fp8   ? kFloat16 | kBFloat16
                       : scaled ? dtype_of(x)
                                : dtype_of(x) | kFloat32);
  const Dtypes dtype = is_fp8 ? dtype_of(out) : dtype_of(x);
  check.tensor("bias", bias, {W}, dtype);
  if (is_fp8) check.strided("x_scales", *x_scales, {G, M}, kFloat32);
  if (scaled) {
    check.strided("weight_scales", *weight_scales, {G, W}, kFloat32);
    check.that(G == 1 || G == K / kWeightGroup, "groups", {"is ", G}, {"1 or ", K / kWeightGroup});
    for (const auto& [name, tensor] : {std::pair{"x_scales", &x_scales}, {"weight_scales", &weight_scales}})
      check.that(M == 0 || !*tensor || starts_on_16_bytes(**tensor), name, "has groups off 16 bytes",
                 "groups that start on 16 bytes");
  }
  check.that(!plan || check.on_cuda(), "plan", {"is ", plan.value_or("")}, "None on cpu");
  if (M == 0) return;

  SmallMGemmParams params{
      .x = x.data<void>(),
      .weight = weight.data<void>(),
      .bias = data_or_null<void>(bias),
      .y = out.data<void>(),
      .rows = M,
      .in = K,
      .out = N,
      .x_stride = x.stride(0),
      .weight_stride = weight.stride(0),
      .y_stride = out.stride(0),
      .dtype = dtype,
      .float32_y = dtype_of(out) == kFloat32,
      .bits = is_fp8    ? 8
              : is_int4 ? 4
                        : 16,
      .x_scales = data_or_null<float>(x_scales),
      .weight_scales = data_or_null<float>(weight_scales),
      .groups = scaled ? G.value : 0,
      .x_scales_stride = is_fp8 ? x_scales->stride(0) : 0,
      .weight_scales_stride = scaled ? weight_scales->stride(0) : 0,
      .gated = gated,
      .plan = GemmPlan::kLibrary,
  };
  if (check.on_cuda()) params.plan = plan_small_m_gemm(check, shape_of(x, weight, gated), device_of(check), plan);
  SD_DISPATCH(check, stream, small_m_gemm, params);
}

std::string small_m_gemm_plan(const TensorView& x, const TensorView& weight, bool gated) {
  Check check("small_m_gemm_plan");
  Dim N{"out_features"}, K{"in_features"};
  check.strided("weight", weight, {N, K}, kFloats | kFloat8 | kUInt8);
  if (dtype_of(weight) == kUInt8) K.value *= 2;
  check.that(x.ndim() > 0 && x.shape(static_cast<int>(x.ndim()) - 1) == K, "x", "has rows of another length",
             {"in_features=", K});
  if (!check.on_cuda()) return to_string(GemmPlan::kLibrary);
  return to_string(fastest_plan(shape_of(x, weight, gated), device_of(check)));
}

namespace {

// X: element type of x; T: of bias and y. weight(n, k, scale) returns an element as float; INT4 needs its group's scale
// for the zero point.
template <class T, class X, class Weight>
void gemm_rows(const SmallMGemmParams& p, const Weight& weight) {
  const int64_t groups = std::max<int64_t>(p.groups, 1), size = p.in / groups;
  for (int64_t row = 0; row < p.rows; ++row) {
    const auto* x = static_cast<const X*>(p.x) + row * p.x_stride;
    const auto product = [&](int64_t n) {
      float total = 0;
      for (int64_t g = 0; g < groups; ++g) {
        const float scale = p.groups > 0 ? p.weight_scales[g * p.weight_scales_stride + n] : 1;
        float sum = 0;
        for (int64_t k = g * size; k < (g + 1) * size; ++k) sum += to_float(x[k]) * weight(n, k, scale);
        if (p.bits == 8) sum *= p.x_scales[g * p.x_scales_stride + row] * scale;
        if (p.bits == 4) sum *= Int4Scale(scale).scale;
        total += sum;
      }
      return p.bias ? total + to_float(static_cast<const T*>(p.bias)[n]) : total;
    };
    void* const y = p.y_row(row);
    for (int64_t n = 0; n < p.out; ++n) p.put<T>(y, n, p.gated ? silu_mul(product(n), product(p.out + n)) : product(n));
  }
}

}  // namespace

void small_m_gemm_cpu(const SmallMGemmParams& p) {
  const auto plain = [&]<class X>() {
    return [&p](int64_t n, int64_t k, float) {
      return to_float(static_cast<const X*>(p.weight)[n * p.weight_stride + k]);
    };
  };
  const auto int4 = [&p](int64_t n, int64_t k, float scale) {
    const Int4Place at = int4_place(k, p.in);
    const int q = static_cast<const uint8_t*>(p.weight)[n * p.weight_stride + at.byte] >> at.shift & 15;
    return static_cast<float>(q - static_cast<int>(Int4Scale(scale).zero));
  };
  with_float_type(p.dtype, [&]<class T>() {
    if (p.bits == 8) return gemm_rows<T, Float8>(p, plain.template operator()<Float8>());
    if (p.bits == 4) return gemm_rows<T, T>(p, int4);
    gemm_rows<T, T>(p, plain.template operator()<T>());
  });
}

}  // namespace specdec::layers
