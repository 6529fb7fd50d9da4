// Refuse lengths that a call on the CPU would have to clamp.
#pragma once

#include <string>

#include "attention/common/visibility.h"
#include "core/errors.h"

namespace specdec::attention {

// Throw if a length would be clamped: without `status` nothing reports that the result lacks rows.
inline void refuse_clamped_lengths(const char* op, const AttentionCall& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const Request r = load_request(p, b);
    if (r.slot < 0 || (r.status & kBadLength) == 0) continue;
    throw ValueError(std::string(op) + ": request " + std::to_string(b) + " has lengths that do not fit " +
                     std::to_string(p.max_kv_len) + " KV rows (by page_table and max_kv_len), " +
                     std::to_string(p.q_rows) + " rows of q and mask, expected lengths that fit, or status");
  }
}

}  // namespace specdec::attention
