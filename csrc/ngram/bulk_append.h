// Append many tokens to a stream with several threads, with the same resulting bytes as one thread.
#pragma once

#include <vector>

#include "core/worker_pool.h"
#include "ngram/layout.h"

namespace specdec::ngram {

class NgramBulk {
 public:
  static constexpr int kTokens = 8192;  // per call, at most

  void append(const NgramView& v, const int32_t* tokens, int count, NgramSlot& stream, WorkerPool& workers);

 private:
  struct Update {
    uint32_t set, tag, position;
  };
  // Updates are sorted by partition of the table, for each piece of the text.
  static constexpr int kPiece = 512, kPieces = kTokens / kPiece, kParts = 16;

  void hash(const NgramView& v, int piece, int begin, int end, uint32_t start, uint32_t scope);
  void update(const NgramView& v, int part, int pieces) const;

  std::vector<int32_t> window_ = std::vector<int32_t>(kNgramMaxOrder + kTokens);
  std::vector<uint32_t> positions_ = std::vector<uint32_t>(kTokens);
  std::vector<Update> updates_ = std::vector<Update>(kTokens * kNgramOrders);
  int begin_[kPieces][kParts + 1];  // start of each partition's updates within a piece's
};

}  // namespace specdec::ngram
