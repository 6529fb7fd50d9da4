// tree_attention on the CPU. One pass computes up to 64 rows of one request and KV head over tiles of 64 KV rows,
// gathered into contiguous float32.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention/common/lengths_cpu.h"
#include "attention/common/tile_pass.h"
#include "attention/common/visibility.h"
#include "attention/tree_attention.h"

namespace specdec::attention {
namespace {

constexpr int kTokens = TilePass::kTokens, kRows = TilePass::kRows;

template <class Kv>
void copy_row(const Kv* __restrict from, float* __restrict to, int D) {
  for (int d = 0; d < D; ++d) to[d] = to_float(from[d]);
}

// Fill pass.k and pass.v with KV rows first to first + kTokens - 1, and zeros for those outside [begin, end) or on an
// invalid page; return a mask of the rows that are present.
template <class Kv>
uint64_t gather_tile(TilePass& pass, const TreeAttentionParams& p, const Request& r, int64_t head, int64_t first,
                     int64_t begin, int64_t end, int32_t& status) {
  const int D = pass.key_dim;
  const kv::RowDivmod page_size{static_cast<int>(p.rows.page_size)};
  uint64_t present = 0;
  for (int j = 0; j < kTokens; ++j) {
    float *k = pass.k_rows + j * D, *v = pass.v + j * D;
    if (first + j >= begin && first + j < end) {
      const kv::KvRow at = find_row(p.rows, page_size, r.slot, first + j);
      status |= at.bits;
      if (at.bits == 0) {
        copy_row(static_cast<const Kv*>(p.k_pool) + row_start(p.k_strides, at, head), k, D);
        copy_row(static_cast<const Kv*>(p.v_pool) + row_start(p.v_strides, at, head), v, D);
        present |= uint64_t{1} << j;
        continue;
      }
    }
    std::fill_n(k, D, 0.0f);
    std::fill_n(v, D, 0.0f);
  }
  return present;
}

// Compute rows [begin, begin + count) of a request and KV head; row n is query row n / G, head n % G of its GQA group.
template <class T, class Kv>
int32_t attend_rows(TilePass& pass, const TreeAttentionParams& p, const Request& r, int64_t head, int64_t begin,
                    int64_t count) {
  const int64_t G = p.q_heads / p.kv_heads, D = p.head_dim;
  const int64_t valid = clamp_to(r.valid_rows * G - begin, int64_t{0}, count);
  int32_t status = 0;
  pass.begin(valid);
  for (int64_t n = 0; n < valid; ++n) {
    const int64_t i = (begin + n) / G, h = head * G + (begin + n) % G;
    const T* q = static_cast<const T*>(p.q) + r.q_start + i * p.q_strides.row + h * p.q_strides.head;
    for (int64_t d = 0; d < D; ++d) pass.q[n * D + d] = to_float(q[d]) * p.log2_scale;
  }

  // Tiles start at multiples of kTokens even with a window, so that no row depends on its neighbors.
  const int64_t kv_begin = valid > 0 ? visible_begin(p, r, begin / G) : 0;
  const int64_t kv_end = valid > 0 ? visible_end(p, r, (begin + valid - 1) / G) : 0;
  for (int64_t first = kv_begin / kTokens * kTokens; first < kv_end; first += kTokens) {
    const uint64_t present = gather_tile<Kv>(pass, p, r, head, first, kv_begin, kv_end, status);
    for (int64_t n = 0; n < valid; ++n) pass.visible[n] = present & visible_word(p, r, (begin + n) / G, first);
    // Padding rows take the mask of the row before them, which keeps their neighbors on the fast path.
    for (int64_t n = valid; n < pass.rows; ++n) pass.visible[n] = pass.visible[n - 1];
    pass.add_tile();
  }

  for (int64_t n = 0; n < count; ++n) {
    const int64_t i = (begin + n) / G, h = head * G + (begin + n) % G;
    T* out = static_cast<T*>(p.out) + r.out_start + i * p.out_strides.row + h * p.out_strides.head;
    const float sum = n < valid ? pass.sum[n] : 0.0f;
    for (int64_t d = 0; d < D; ++d) out[d] = from_float<T>(sum == 0 ? 0.0f : pass.out[n * D + d] / sum * p.v_scale);
    if (p.lse) p.lse[(r.flat_row + i) * p.q_heads + h] = n < valid ? pass.lse(n) : -HUGE_VALF;
  }
  return status;
}

}  // namespace

void tree_attention_cpu(const TreeAttentionParams& p) {
  if (p.status == nullptr) refuse_clamped_lengths("tree_attention", p);
  TilePass pass = TilePass::allocate(p.head_dim, p.head_dim, false);
  pass.soft_cap = p.soft_cap;
  with_types(p, [&]<class T, class Kv>() {
    const int64_t G = p.q_heads / p.kv_heads, requests = p.batch + (p.cu_seqlens_q != nullptr);
    for (int64_t b = 0; b < requests; ++b) {
      const Request r = load_request(p, b);
      int32_t status = r.status;
      for (int64_t head = 0; head < p.kv_heads; ++head)
        for (int64_t begin = 0; begin < r.rows * G; begin += kRows)
          status |= attend_rows<T, Kv>(pass, p, r, head, begin, std::min<int64_t>(kRows, r.rows * G - begin));
      set_status(p.status, r.slot, status);
    }
  });
}

}  // namespace specdec::attention
