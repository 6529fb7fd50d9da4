// Check the arguments that every call of attention over paged rows has, and fill in its AttentionCall.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "attention/attention_call.h"
#include "core/dispatch.h"

namespace specdec::attention {

constexpr double kLog2e = 1.4426950408889634;
constexpr int64_t kSplitMultiple = 128;  // KV rows; a multiple of every kernel's KV tile
// KV rows that a plan assumes without max_kv_len: page tables often have room for far more than the texts need. At
// 32768 rows, plans for 4096 lose at most a seventh; for short texts, plans for 32768 take up to twice as long.
constexpr int64_t kDefaultPlanTokens = 4096;

// Return the stride of a dimension, or 0 for a dimension of size 1, whose stride may be anything.
inline int64_t effective_stride(const TensorView& t, int i) { return t.shape(i) > 1 ? t.stride(i) : 0; }

inline RowStrides row_strides(const TensorView& t) {
  const int n = static_cast<int>(t.ndim());
  return {n == 4 ? effective_stride(t, 0) : 0, effective_stride(t, n - 3), effective_stride(t, n - 2)};
}

// Return the strides of a pool [num_pages, page_size, heads, width], or of one without heads.
inline PoolStrides pool_strides(const TensorView& t) {
  return {effective_stride(t, 0), effective_stride(t, 1), t.ndim() == 4 ? effective_stride(t, 2) : 0};
}

inline bool rows_are_aligned(const TensorView& t) {
  int64_t strides = 0;
  for (int i = 0; i + 1 < t.ndim(); ++i) strides |= effective_stride(t, i) * (t.dl.dtype.bits / 8);
  return reinterpret_cast<uintptr_t>(t.data<void>()) % 16 == 0 && strides % 16 == 0;
}

// Throw unless a call on the CPU is without a plan.
inline void check_no_plan(const Check& check, const std::optional<std::string>& plan) {
  if (plan) check.that(false, "plan", {"is ", *plan}, "None on cpu");
}

// Checks of one call. The op calls queries(), checks its pools, then calls lengths(), and if it runs, the rest.
struct CallCheck {
  Check& check;
  bool packed;
  Dim B{"batch"}, Q{"q_rows"}, Hq{"q_heads"}, P{"num_pages"}, page_size{"page_size"}, num_slots{"num_slots"};
  Dim max_pages{"max_pages"}, ends{"batch + 1"}, W{"mask_words"};
  int64_t planned_kv_len = 0;  // KV rows that the plan assumes: max_kv_len if it was given

  CallCheck(Check& check, const OptTensor& cu_seqlens_q) : check(check), packed(cu_seqlens_q.has_value()) {}

  void queries(const TensorView& q, Dim& width) {
    if (packed)
      check.strided("q", q, {Q, Hq, width}, kFloats);
    else
      check.strided("q", q, {B, Q, Hq, width}, kFloats);
    check.range("q_rows * q_heads", Q * Hq, 0, INT32_MAX);
  }

  void pages(const char* pool) const {
    check.that(page_size >= 1 && page_size <= INT32_MAX, pool, "has page_size " + std::to_string(page_size),
               "1 or more");
  }

  // Check what bounds the work, and fill in the parts of the call that follow.
  void lengths(AttentionCall& call, const TensorView& q, const TensorView& page_table, const OptTensor& cu_seqlens_q,
               std::optional<int64_t> fixed_split, std::optional<int64_t> max_kv_len) {
    check.tensor("page_table", page_table, {num_slots, max_pages}, kInt32);
    if (packed) {
      check.tensor("cu_seqlens_q", *cu_seqlens_q, {ends}, kInt32);
      check.that(ends >= 1, "cu_seqlens_q", "is empty", "batch + 1 row offsets");
      B.value = ends - 1;
    }
    if (fixed_split && (*fixed_split <= 0 || *fixed_split % kSplitMultiple != 0))
      check.that(false, "fixed_split", "is " + std::to_string(*fixed_split), "a positive multiple of 128");
    if (max_kv_len) check.that(*max_kv_len >= 1, "max_kv_len", {"is ", *max_kv_len}, "1 or more");

    call.dtype = dtype_of(q);
    call.rows = {.page_table = page_table.data<const int32_t>(),
                 .page_refs = nullptr,
                 .max_pages = max_pages,
                 .num_pages = P,
                 .page_size = page_size};
    call.cu_seqlens_q = data_or_null<const int32_t>(cu_seqlens_q);
    call.batch = B;
    call.q_rows = Q;
    call.q_heads = Hq;
    call.num_slots = num_slots;
    // No request has more rows than this.
    call.fixed_split = std::min<int64_t>(fixed_split.value_or(0), INT32_MAX / kSplitMultiple * kSplitMultiple);
    call.max_kv_len = std::min(row_capacity(call.rows), max_kv_len.value_or(INT64_MAX));
    planned_kv_len = std::min(call.max_kv_len, max_kv_len.value_or(kDefaultPlanTokens));
  }

  // Check which rows there are and what they see.
  void rows(AttentionCall& call, const TensorView& q, const TensorView& prefix_lens, const OptTensor& slots,
            const OptTensor& q_lens, std::optional<int64_t> tail_len, const OptTensor& mask,
            std::optional<int64_t> window) {
    check.that(!packed || !q_lens, "q_lens", "is given together with cu_seqlens_q", "one of the two");
    check.tensor("prefix_lens", prefix_lens, {num_slots}, kInt32);
    check.slots(slots, B, num_slots);
    check.tensor("q_lens", q_lens, {B}, kInt32);
    if (tail_len) check.range("tail_len", *tail_len, 0, INT32_MAX);
    if (packed)
      check.tensor("mask", mask, {Q, W}, kInt64);
    else
      check.tensor("mask", mask, {B, Q, W}, kInt64);
    const int64_t known_tail = tail_len ? *tail_len : packed ? 0 : Q.value;
    check.that(!mask || 64 * W >= known_tail, "mask", "has mask_words " + std::to_string(W),
               std::to_string((known_tail + 63) / 64) + " or more for a tail of " + std::to_string(known_tail));
    if (window && *window < 1) check.that(false, "window", "is " + std::to_string(*window), "1 or more");

    call.q = q.data<void>();
    call.q_strides = row_strides(q);
    call.prefix_lens = prefix_lens.data<const int32_t>();
    call.slots = data_or_null<const int32_t>(slots);
    call.q_lens = data_or_null<const int32_t>(q_lens);
    call.mask = data_or_null<const int64_t>(mask);
    call.mask_words = mask ? W.value : 0;
    call.tail_len = tail_len.value_or(-1);
    call.window = window.value_or(INT64_MAX);
  }

  void outputs(AttentionCall& call, const TensorView& out, Dim& width, const OptTensor& lse, const OptTensor& status) {
    if (packed) {
      check.strided_output("out", out, {Q, Hq, width}, call.dtype);
      check.output("lse", lse, {Q, Hq}, kFloat32);
    } else {
      check.strided_output("out", out, {B, Q, Hq, width}, call.dtype);
      check.output("lse", lse, {B, Q, Hq}, kFloat32);
    }
    check.output("status", status, {num_slots}, kInt32);

    call.out = out.data<void>();
    call.out_strides = row_strides(out);
    call.lse = data_or_null<float>(lse);
    call.status = data_or_null<int32_t>(status);
  }

  // Return whether there is nothing to write. Padding rows after no packed request are still written.
  bool is_empty() const { return Q == 0 || Hq == 0 || (B == 0 && !packed); }
};

inline bool has_rows(const AttentionCall& call) { return call.q_rows > 0 && call.q_heads > 0; }

}  // namespace specdec::attention
