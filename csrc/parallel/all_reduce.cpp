// all_reduce, all_gather, all_reduce_add_rms_norm: argument checks and the CPU implementation, for ranks that are
// threads of one process or processes with shared memory.
#include "parallel/all_reduce.h"

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "core/bytes.h"
#include "layers/norm/rms_norm_row.h"
#include "round/clock.h"

namespace specdec::parallel {

void all_reduce(CallStream stream, const TensorView& x, const TensorView& buffers, const TensorView& state,
                int64_t rank, int64_t capacity, double timeout, const TensorView& out) {
  Check check("all_reduce");
  Dim T{"rows"}, H{"width"}, S{"size"};
  const ExchangeParams exchange = check_exchange(check, x, buffers, state, rank, capacity, timeout, T, H, S);
  check.output("out", out, {T, H}, exchange.dtype);
  check.that(copy_unit({&out}) == kPackBytes, "out", "is not aligned", {"a multiple of ", kPackBytes, " bytes"});
  const AllReduceParams params{.exchange = exchange, .out = out.data<void>()};
  if (T == 0) return;
  SD_DISPATCH(check, stream, all_reduce, params);
}

void all_gather(CallStream stream, const TensorView& x, const TensorView& buffers, const TensorView& state,
                int64_t rank, int64_t capacity, double timeout, const TensorView& out) {
  Check check("all_gather");
  Dim T{"rows"}, H{"width"}, S{"size"};
  const ExchangeParams exchange = check_exchange(check, x, buffers, state, rank, capacity, timeout, T, H, S);
  Dim V{"size * width", S * H};
  check.output("out", out, {T, V}, exchange.dtype);
  check.that(copy_unit({&out}) == kPackBytes, "out", "is not aligned", {"a multiple of ", kPackBytes, " bytes"});
  const AllReduceParams params{.exchange = exchange, .out = out.data<void>()};
  if (T == 0) return;
  SD_DISPATCH(check, stream, all_gather, params);
}

void all_reduce_add_rms_norm(CallStream stream, const TensorView& x, const TensorView& buffers, const TensorView& state,
                             int64_t rank, int64_t capacity, double timeout, const TensorView& weight, double eps,
                             const OptTensor& residual, const TensorView& out_sum, const TensorView& out) {
  Check check("all_reduce_add_rms_norm");
  Dim T{"rows"}, H{"width"}, S{"size"};
  const ExchangeParams exchange = check_exchange(check, x, buffers, state, rank, capacity, timeout, T, H, S);
  check.tensor("weight", weight, {H}, exchange.dtype);
  const float epsilon = check.factor("eps", eps);
  if (residual) check.strided("residual", *residual, {T, H}, exchange.dtype);
  check.strided_output("out[1]", out_sum, {T, H}, exchange.dtype);
  check.output("out[0]", out, {T, H}, exchange.dtype);
  const bool aligned =
      copy_unit({&weight, &out_sum, &out}) == kPackBytes && (!residual || copy_unit({&*residual}) == kPackBytes);
  check.that(aligned, "weight, residual or out", "is not aligned", {"a multiple of ", kPackBytes, " bytes"});
  const AllReduceAddRmsNormParams params{.exchange = exchange,
                                         .residual = data_or_null<void>(residual),
                                         .weight = weight.data<void>(),
                                         .out_sum = out_sum.data<void>(),
                                         .out = out.data<void>(),
                                         .residual_stride = residual ? residual->stride(0) : 0,
                                         .sum_stride = out_sum.stride(0),
                                         .eps = epsilon};
  if (T == 0) return;
  SD_DISPATCH(check, stream, all_reduce_add_rms_norm, params);
}

namespace {

using Words = std::atomic_ref<uint32_t>;

uint32_t* word(char* buffer, int64_t index) { return reinterpret_cast<uint32_t*>(buffer) + index; }

// One call of this rank, on the words of its rows.
class HostExchange {
 public:
  // Write x to the other ranks, and empty what the call before has read.
  explicit HostExchange(const ExchangeParams& p) : p_(p), is_over_(p.state->timed_out != 0) {
    phase_ = p.state->calls % kPhases;
    for (int64_t to = 0; to < p.size && !is_over_; ++to)
      for (int64_t i = 0; to != p.rank && i < num_words(); ++i)
        Words(*word(p.buffers[to], first_word(phase_, p.rank) + i))
            .store(without_negative_zero(own(i)), std::memory_order_release);
    const uint32_t before = (phase_ + kPhases - 1) % kPhases;
    for (int64_t from = 0; from < p.size; ++from)
      for (int64_t i = 0; from != p.rank && i < int64_t{p.state->written[before]} * kPackWords; ++i)
        Words(*word(p.buffers[p.rank], first_word(before, from) + i)).store(kEmpty, std::memory_order_release);
  }

  // Wait for word i of a rank; 0 once a wait has taken too long.
  uint32_t read(int64_t from, int64_t i) {
    if (from == p_.rank) return own(i);
    const Words there(*word(p_.buffers[p_.rank], first_word(phase_, from) + i));
    int64_t begin = 0;
    while (!is_over_) {
      const uint32_t value = there.load(std::memory_order_acquire);
      if (value != kEmpty) return value;
      const int64_t now = round::nanoseconds();
      if (begin == 0) begin = now;
      if (now - begin > p_.timeout_ns) {
        set_timed_out(*p_.state, static_cast<int>(from));
        is_over_ = true;
      }
      std::this_thread::yield();
    }
    return 0;
  }

  // Count the call.
  void finish() {
    p_.state->written[phase_] = static_cast<uint32_t>(num_words() / kPackWords);
    p_.state->calls += 1;
  }

  int64_t row_words() const { return p_.width * (p_.dtype == kFloat32 ? 4 : 2) / 4; }

 private:
  int64_t num_words() const { return p_.rows * row_words(); }
  int64_t first_word(uint32_t phase, int64_t from) const { return first_pack(p_, phase, from) * kPackWords; }
  uint32_t own(int64_t i) const { return static_cast<const uint32_t*>(p_.x)[i]; }

  const ExchangeParams& p_;
  bool is_over_;
  uint32_t phase_;
};

// Write the sums of one row, in the order of ranks in float32.
template <class T>
void sum_row(HostExchange& exchange, const ExchangeParams& p, int64_t row, T* out) {
  constexpr int kPerWord = 4 / sizeof(T);
  for (int64_t i = 0; i < exchange.row_words(); ++i) {
    float sums[kPerWord] = {};
    for (int64_t from = 0; from < p.size; ++from) {
      const uint32_t bits = exchange.read(from, row * exchange.row_words() + i);
      T values[kPerWord];
      std::memcpy(values, &bits, sizeof bits);
      for (int n = 0; n < kPerWord; ++n) sums[n] += to_float(values[n]);
    }
    for (int n = 0; n < kPerWord; ++n) out[i * kPerWord + n] = from_float<T>(sums[n]);
  }
}

}  // namespace

void all_reduce_cpu(const AllReduceParams& p) {
  HostExchange exchange(p.exchange);
  with_float_type(p.exchange.dtype, [&]<class T>() {
    for (int64_t row = 0; row < p.exchange.rows; ++row)
      sum_row(exchange, p.exchange, row, static_cast<T*>(p.out) + row * p.exchange.width);
  });
  exchange.finish();
}

void all_gather_cpu(const AllReduceParams& p) {
  HostExchange exchange(p.exchange);
  const int64_t words = exchange.row_words();
  auto* out = static_cast<uint32_t*>(p.out);
  for (int64_t row = 0; row < p.exchange.rows; ++row)
    for (int64_t from = 0; from < p.exchange.size; ++from)
      for (int64_t i = 0; i < words; ++i) *out++ = without_negative_zero(exchange.read(from, row * words + i));
  exchange.finish();
}

void all_reduce_add_rms_norm_cpu(const AllReduceAddRmsNormParams& p) {
  const int64_t width = p.exchange.width;
  HostExchange exchange(p.exchange);
  with_float_type(p.exchange.dtype, [&]<class T>() {
    std::vector<T> total(static_cast<size_t>(width));
    for (int64_t row = 0; row < p.exchange.rows; ++row) {
      sum_row(exchange, p.exchange, row, total.data());
      auto* sum = static_cast<T*>(p.out_sum) + row * p.sum_stride;
      const auto* residual = static_cast<const T*>(p.residual) + row * p.residual_stride;
      for (int64_t i = 0; i < width; ++i)
        sum[i] = p.residual ? from_float<T>(to_float(total[i]) + to_float(residual[i])) : total[i];
      layers::rms_norm_row_cpu(sum, static_cast<const T*>(p.weight), width, p.eps,
                               static_cast<T*>(p.out) + row * width);
    }
  });
  exchange.finish();
}

}  // namespace specdec::parallel
