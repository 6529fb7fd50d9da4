// The checks of arguments that all exchanges among ranks have.
#include "parallel/exchange.h"

#include "core/bytes.h"

namespace specdec::parallel {

ExchangeParams check_exchange(Check& check, const TensorView& x, const TensorView& buffers, const TensorView& state,
                              int64_t rank, int64_t capacity, double timeout, Dim& rows, Dim& width, Dim& size) {
  check.tensor("x", x, {rows, width}, kFloats);
  check.tensor("buffers", buffers, {size}, kInt64);
  check.range("size", size, 2, kMaxRanks);
  if (check.on_cuda()) check.that(size == 2 || size == 4 || size == 8, "size", {"is ", size}, "2, 4 or 8 on a GPU");
  check.output("state", state, {kStateWords}, kInt32);
  check.range("rank", rank, 0, size - 1);
  check.range("width", width, 1, INT32_MAX);
  const int64_t row_bytes = width * item_bytes(x);
  check.that(row_bytes % kPackBytes == 0, "x", {"has rows of ", row_bytes, " bytes"}, {"a multiple of ", kPackBytes});
  check.that(copy_unit({&x}) == kPackBytes, "x", "is not aligned", {"a multiple of ", kPackBytes, " bytes"});
  check.range("capacity", capacity, 0, INT32_MAX);
  check.range("rows * packs", rows * (row_bytes / kPackBytes), 0, capacity);
  check.that(timeout > 0 && timeout <= 3600, "timeout", {"is ", timeout}, "above 0 and at most 3600");
  return {.x = x.data<void>(),
          .buffers = reinterpret_cast<char* const*>(buffers.data<int64_t>()),
          .state = state.data<ExchangeState>(),
          .rows = rows,
          .width = width,
          .size = size,
          .rank = rank,
          .capacity = capacity,
          .timeout_ns = static_cast<int64_t>(timeout * 1e9),
          .dtype = dtype_of(x)};
}

}  // namespace specdec::parallel
