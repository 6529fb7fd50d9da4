// mla_tree_attention on the CPU. One pass computes up to 64 rows of one request, or with index lists of one query row,
// over tiles of 64 latent rows, gathered into contiguous float32.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "attention/common/lengths_cpu.h"
#include "attention/common/tile_pass.h"
#include "core/errors.h"
#include "mla/visible_rows.h"

namespace specdec::mla {
namespace {

using attention::TilePass;
constexpr int kTokens = TilePass::kTokens, kRows = TilePass::kRows;

// Fill token j of a tile with a KV row; return its bit, or 0 and a token of zeros if there is no such row.
template <class Row>
uint64_t gather_token(TilePass& pass, const MlaTreeAttentionParams& p, const Request& r, int j, int64_t row,
                      int32_t& status) {
  float* to = pass.k_rows + j * p.width;
  kv::KvRow at;
  at.bits = kBadLength;
  if (row >= 0) {
    at = find_row(p.rows, kv::RowDivmod{static_cast<int>(p.rows.page_size)}, r.slot, row);
    status |= at.bits;
  }
  if (at.bits != 0) {
    std::fill_n(to, p.width, 0.0f);
    return 0;
  }
  const char* from = row_address(p, at);
  for (int64_t d = 0; d < p.width; ++d) to[d] = latent_element<Row>(from, d);
  return uint64_t{1} << j;
}

// Compute rows [begin, begin + count) of a request; row n is head n % q_heads of query row n / q_heads. With index
// lists all of them belong to one query row.
template <class T, class Row>
int32_t attend_rows(TilePass& pass, const MlaTreeAttentionParams& p, const Request& r, int64_t begin, int64_t count) {
  const int64_t H = p.q_heads;
  const int64_t valid = clamp_to(r.valid_rows * H - begin, int64_t{0}, count);
  int32_t status = 0;
  pass.begin(valid);
  for (int64_t n = 0; n < valid; ++n) {
    const int64_t i = (begin + n) / H, h = (begin + n) % H;
    const T* q = static_cast<const T*>(p.q) + r.q_start + i * p.q_strides.row + h * p.q_strides.head;
    for (int64_t d = 0; d < p.width; ++d) pass.q[n * p.width + d] = to_float(q[d]) * p.log2_scale;
  }

  if (valid > 0 && r.slot >= 0 && p.indices != nullptr) {
    const int32_t end = listed_end(p, r);
    for (int64_t first = 0; first < p.num_indices; first += kTokens) {
      uint64_t present = 0;
      for (int j = 0; j < kTokens; ++j) {
        const int64_t k = first + j;
        const int64_t row = k < p.num_indices ? listed_row(p, r, end, begin / H, k, status) : -1;
        present |= gather_token<Row>(pass, p, r, j, row, status);
      }
      std::fill_n(pass.visible, pass.rows, present);
      pass.add_tile();
    }
  } else if (valid > 0 && p.indices == nullptr) {
    // Tiles start at multiples of kTokens even with a window, so that no row depends on its neighbors.
    const int64_t kv_begin = visible_begin(p, r, static_cast<int32_t>(begin / H));
    const int64_t kv_end = visible_end(p, r, static_cast<int32_t>((begin + valid - 1) / H));
    for (int64_t first = kv_begin / kTokens * kTokens; first < kv_end; first += kTokens) {
      uint64_t present = 0;
      for (int j = 0; j < kTokens; ++j) {
        const int64_t row = first + j >= kv_begin && first + j < kv_end ? first + j : -1;
        present |= gather_token<Row>(pass, p, r, j, row, status);
      }
      for (int64_t n = 0; n < valid; ++n)
        pass.visible[n] = present & visible_word(p, r, static_cast<int32_t>((begin + n) / H), first);
      // Padding rows take the mask of the row before them, which keeps their neighbors on the fast path.
      for (int64_t n = valid; n < pass.rows; ++n) pass.visible[n] = pass.visible[n - 1];
      pass.add_tile();
    }
  }

  for (int64_t n = 0; n < count; ++n) {
    const int64_t i = (begin + n) / H, h = (begin + n) % H;
    T* out = static_cast<T*>(p.out) + r.out_start + i * p.out_strides.row + h * p.out_strides.head;
    const float sum = n < valid ? pass.sum[n] : 0.0f;
    for (int64_t d = 0; d < p.latent_dim; ++d)
      out[d] = from_float<T>(sum == 0 ? 0.0f : pass.out[n * p.latent_dim + d] / sum * p.v_scale);
    if (p.lse) p.lse[(r.flat_row + i) * H + h] = n < valid ? pass.lse(n) : -HUGE_VALF;
  }
  return status;
}

}  // namespace

void mla_tree_attention_cpu(const MlaTreeAttentionParams& p) {
  if (p.status == nullptr) attention::refuse_clamped_lengths("mla_tree_attention", p);
  TilePass pass = TilePass::allocate(p.width, p.latent_dim, true);
  with_row_types(p, [&]<class T, class Row>() {
    const int64_t requests = p.batch + (p.cu_seqlens_q != nullptr), H = p.q_heads;
    for (int64_t b = 0; b < requests; ++b) {
      const Request r = load_request(p, b);
      int32_t status = r.status;
      for (int64_t begin = 0; begin < r.rows * H;) {
        const int64_t end = p.indices ? (begin / H + 1) * H : r.rows * H;  // a list's rows end with its query row
        const int64_t count = std::min<int64_t>(kRows, end - begin);
        const int32_t bits = attend_rows<T, Row>(pass, p, r, begin, count);
        if (p.indices && p.status == nullptr && (bits & kBadLength))
          throw ValueError("mla_tree_attention: indices of query row " + std::to_string(begin / H) + " of request " +
                           std::to_string(b) + " name no row of its prefix and tail, expected -1 or 0 to " +
                           std::to_string(listed_end(p, r) - 1) + ", or status");
        status |= bits;
        begin += count;
      }
      set_status(p.status, r.slot, status);
    }
  });
}

}  // namespace specdec::mla
