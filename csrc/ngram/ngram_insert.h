// What writes to the index: the parameters of its kernels and their CPU twins.
#pragma once

#include "core/dispatch.h"
#include "ngram/layout.h"

namespace specdec::ngram {

constexpr int64_t kNgramChunk = 1 << 16;  // tokens of one call of ngram_insert_cuda
constexpr int64_t kNgramRows = 128;       // rows of one

// What writing works in. Zero at first.
struct alignas(256) NgramWork {
  uint32_t planned;    // blocks of a running call that have their plan
  NgramSlot document;  // the one being inserted
};

constexpr size_t kNgramWorkBytes = sizeof(NgramWork);

struct NgramInsertParams {
  NgramView index;
  void* work;  // kNgramWorkBytes, aligned to 256
  int64_t max_len;
  const int32_t* tokens;     // [rows, width]
  const int32_t* lengths;    // [rows] or null: all of them
  const int32_t* slots;      // [rows] or null: first_slot and those behind it
  const int32_t* match_len;  // [rows] or null
  int64_t rows, width, first_slot;
  // Of a single row that is a piece of a longer text:
  bool is_document, is_first;  // for nobody's stream; its first piece
  uint32_t group;              // a document's
  int64_t start;               // where the piece belongs in the stream, -1: at its end
  int64_t left;                // tokens of the text from the piece on
};

// Adds rows to their streams in order. Rows that the host would refuse add nothing and are counted.
void ngram_insert_cuda(const NgramInsertParams& p, Stream stream);

struct NgramBeginParams {
  NgramView index;
  int64_t slot;
  uint64_t name;  // of the request, 0: none
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

// From one device or the host to another, behind what the stream has; `wait` returns when it is done.
void ngram_copy_cuda(void* to, const void* from, size_t bytes, bool wait, Stream stream);
void ngram_zero_cuda(void* memory, size_t bytes, Stream stream);

}  // namespace specdec::ngram
