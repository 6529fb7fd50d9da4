// Writes to the index: parameters of the kernels and of their CPU counterparts.
#pragma once

#include "core/dispatch.h"
#include "ngram/layout.h"

namespace specdec::ngram {

constexpr int64_t kNgramMaxTokens = 1 << 16;  // tokens per call of ngram_insert_cuda
constexpr int64_t kNgramMaxRows = 128;        // rows per call

// Workspace of writes. Initially zero.
struct alignas(256) NgramWork {
  uint32_t planned;    // blocks of a running call that have finished their plan
  NgramSlot document;  // the document being inserted
};

constexpr size_t kNgramWorkBytes = sizeof(NgramWork);

struct NgramInsertParams {
  NgramView index;
  void* work;  // kNgramWorkBytes, aligned to 256
  int64_t max_len;
  const int32_t* tokens;     // [rows, width]
  const int32_t* lengths;    // [rows] or null: whole rows
  const int32_t* slots;      // [rows] or null: consecutive slots from first_slot on
  const int32_t* match_len;  // [rows] or null
  int64_t rows, width, first_slot;
  // For a single row that is a piece of a longer text:
  bool is_document, is_first;  // inserted without a stream; its first piece
  uint32_t group;              // of a document
  int64_t start;               // position of the piece in the stream, -1: at its end
  int64_t left;                // tokens of the text from this piece on
};

// Append rows to their streams in order. Rows that the host would reject add nothing and are counted.
void ngram_insert_cuda(const NgramInsertParams& p, Stream stream);

struct NgramBeginParams {
  NgramView index;
  int64_t slot;
  uint64_t name;  // request number + 1; 0: none
  uint32_t group;
  bool is_private;
};
void ngram_begin_cpu(const NgramBeginParams& p);
void ngram_begin_cuda(const NgramBeginParams& p, Stream stream);

struct NgramReleaseParams {
  NgramView index;
  int64_t slot;
};
void ngram_release_cpu(const NgramReleaseParams& p);
void ngram_release_cuda(const NgramReleaseParams& p, Stream stream);

// Copy between devices or the host, in stream order; with `wait`, return when it is done.
void ngram_copy_cuda(void* to, const void* from, size_t bytes, bool wait, Stream stream);
void ngram_zero_cuda(void* memory, size_t bytes, Stream stream);

}  // namespace specdec::ngram
