// Argument checks that read like the op's signature.
//
//   Check check("verify_tree");
//   Dim B{"batch"}, N{"num_nodes"}, V{"vocab"};
//   check.strided("logits", logits, {B, N, V}, kFloats);      // binds B, N, V
//   check.tensor("parents", parents, {B, N}, kInt32);         // must agree with them
//   check.output("out", out, {B}, kInt32);                    // also: writable
//
// Messages read `<op>: <argument> <what it is>, expected <what it must be>`. Costs about 6 ns per tensor.
#pragma once

#include <concepts>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "core/tensor.h"

namespace specdec {

// A named size, bound by the first tensor that has it. -1 is "not bound", so empty batches work.
struct Dim {
  const char* name;
  int64_t value = -1;
  operator int64_t() const { return value; }
};

// One entry of an expected shape: a Dim to bind or compare, or a number.
struct ShapeItem {
  Dim* dim = nullptr;
  int64_t number = 0;
  ShapeItem(Dim& d) : dim(&d) {}
  ShapeItem(int64_t n) : number(n) {}
  ShapeItem(int n) : number(n) {}
};
using Shape = std::initializer_list<ShapeItem>;

struct Dtypes {
  unsigned bits;
};
constexpr Dtypes kInt32{1}, kInt64{2}, kFloat32{4}, kFloat16{8}, kBFloat16{16}, kFloat8{32}, kUInt8{64};
constexpr Dtypes operator|(Dtypes a, Dtypes b) { return {a.bits | b.bits}; }
constexpr Dtypes kFloats = kFloat32 | kFloat16 | kBFloat16;

// Return the dtype of a checked tensor, as its bit in Dtypes.
Dtypes dtype_of(const TensorView& t);
inline bool operator==(Dtypes a, Dtypes b) { return a.bits == b.bits; }

// A part of a message, formatted only if a check fails.
class Word {
 public:
  Word(const char* text) : part_(std::string_view(text)) {}
  Word(const std::string& text) : part_(std::string_view(text)) {}
  Word(std::integral auto number) : part_(static_cast<int64_t>(number)) {}
  Word(const Dim& dim) : part_(dim.value) {}
  Word(double number) : part_(number) {}
  Word(DLDataType dtype) : part_(dtype) {}
  std::string text() const;

 private:
  std::variant<std::string_view, int64_t, double, DLDataType> part_;
};

// One word, or several in braces: {"is ", value}. Lives until the call that it is an argument of returns.
class Phrase {
 public:
  template <class T>
    requires std::convertible_to<T, Word>
  Phrase(const T& word) : one_(word), words_(&one_, 1) {}
  Phrase(std::initializer_list<Word> words) : words_(words) {}
  Phrase(const Phrase&) = delete;
  std::string text() const;

 private:
  Word one_ = "";
  std::span<const Word> words_;
};

class Check {
 public:
  explicit Check(const char* op) : op_(op) {}

  // Require a contiguous tensor of this shape and one of these dtypes, on the device of the first tensor checked.
  void tensor(const char* name, const TensorView& t, Shape shape, Dtypes dtypes);
  // Like tensor(), but only the last dimension must be contiguous.
  void strided(const char* name, const TensorView& t, Shape shape, Dtypes dtypes);
  // Like tensor(), but only one of the last two dimensions must be contiguous.
  void matrices(const char* name, const TensorView& t, Shape shape, Dtypes dtypes);
  // Like tensor(), for a tensor that the op writes.
  void output(const char* name, const TensorView& t, Shape shape, Dtypes dtypes);
  void strided_output(const char* name, const TensorView& t, Shape shape, Dtypes dtypes);

  void tensor(const char* name, const OptTensor& t, Shape shape, Dtypes dtypes) {
    if (t) tensor(name, *t, shape, dtypes);
  }
  void output(const char* name, const OptTensor& t, Shape shape, Dtypes dtypes) {
    if (t) output(name, *t, shape, dtypes);
  }

  // Return the op's scratch memory: a contiguous, writable tensor of any dtype and shape, aligned to 16 bytes, with at
  // least `bytes` bytes. Null if bytes is 0.
  void* workspace(const OptTensor& workspace, int64_t bytes);

  // Require a value within [low, high].
  void range(const char* name, int64_t value, int64_t low, int64_t high);
  // Return value * unit in float32; requires it to be finite, normal and above 0.
  float factor(const char* name, double value, double unit = 1);
  // Throw `<op>: <name> <is>, expected <expected>` unless ok.
  void that(bool ok, const char* name, const Phrase& is, const Phrase& expected) const {
    if (!ok) fail(name, is.text(), expected.text());
  }
  // Check `slots`, [batch]. If it is absent, row b works for slot b, which requires batch <= num_slots.
  void slots(const OptTensor& slots, Dim& batch, const Dim& num_slots);

  // Check the offsets of packed rows, [batch + 1], if given; binds the batch.
  void packed(const char* name, const OptTensor& cu_seqlens, Dim& batch);

  // Require that the tensors checked so far are on the CPU, for ops without a CUDA half.
  void require_cpu() const;

  bool on_cuda() const { return first_.is_cuda(); }
  const char* op() const { return op_; }
  const char* first_name() const { return first_name_; }
  DLDevice device() const { return first_.dl.device; }

  // Return the stream to launch on: the `stream=` keyword, else the producer's current stream, else the legacy default.
  void* stream(const CallStream& call) const;

 private:
  void common(const char* name, const TensorView& t, Shape shape, Dtypes dtypes, int contiguous_from);
  void memory(const char* name, const TensorView& t, int contiguous_from);
  [[noreturn]] void fail(const char* name, const std::string& is, const std::string& expected) const;

  const char* op_;
  const char* first_name_ = nullptr;
  TensorView first_{};
};

}  // namespace specdec
