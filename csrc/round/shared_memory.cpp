#include "round/shared_memory.h"

#include "core/dispatch.h"
#include "core/errors.h"

namespace specdec::round {

int32_t* shared_words(const Check& check, const char* name, const TensorView& ring) {
  if (ring.is_cuda() == check.on_cuda()) return ring.data<int32_t>();
#ifdef SPECDEC_WITH_CUDA
  if (check.on_cuda()) {
    const DeviceGuard guard(check.device().device_id);
    if (void* words = device_address(ring.data<int32_t>())) return static_cast<int32_t*>(words);
  }
#endif
  throw ValueError(std::string(check.op()) + ": " + name + " is " + (ring.is_cuda() ? "on cuda" : "not pinned") +
                   ", expected " + (ring.is_cuda() ? "a cpu tensor" : "a pinned or cuda tensor") + " like " +
                   check.first_name());
}

}  // namespace specdec::round
