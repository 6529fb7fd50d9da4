#include "scheduler/admission.h"

#include <algorithm>

namespace specdec::scheduler {

int64_t rows_for(const Config& config, int64_t seq_len) { return std::min(seq_len, config.max_len) + config.reserve; }

int64_t pages_for(const Config& config, int64_t seq_len) {
  return (rows_for(config, seq_len) + config.page_size - 1) / config.page_size;
}

int64_t pages_held(const Config& config, int64_t seq_len, int64_t ahead) {
  const int64_t whole = pages_for(config, seq_len);
  // The window may see only a part of the first page and of the last.
  const int64_t of_window = (config.window + ahead + config.page_size - 1) / config.page_size + 1;
  return config.window == 0 ? whole : std::min(whole, of_window);
}

int64_t rows_ahead(const Config& config) { return std::max(config.prefill_chunk, config.reserve); }

int64_t pages_needed(const Config& config, Holders holders, int64_t more_rounds) {
  int64_t pages = 0;
  for (const auto& holder : holders) {
    const int64_t rounds = holder->running() ? holder->in_flight + more_rounds : 0;
    const int64_t ahead = holder->running() ? config.reserve : rows_ahead(config);
    pages += pages_held(config, holder->seq_len() + config.accept_width * rounds, ahead) - holder->num_shared;
  }
  return pages;
}

int64_t max_kv_len(const Config& config, std::span<Request* const> requests) {
  int64_t longest = 0;
  for (const Request* request : requests)
    longest = std::max(longest, request->seq_len() + config.accept_width * request->in_flight);
  return rows_for(config, longest);
}

bool round_fits(const Config& config, Holders holders, int64_t num_locked) {
  return pages_needed(config, holders, 0) + num_locked <= config.num_pages;
}

bool request_fits(const Config& config, Holders holders, int64_t num_locked, const Request& request) {
  const int64_t own = pages_held(config, request.seq_len(), rows_ahead(config)) - request.num_shared;
  return pages_needed(config, holders, 1) + own + num_locked <= config.num_pages;
}

}  // namespace specdec::scheduler
