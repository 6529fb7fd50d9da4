#include "core/dispatch.h"

#include "core/errors.h"

namespace specdec {

void throw_no_cuda(const Check& check) {
  throw NotImplementedError(std::string(check.op()) + ": " + check.first_name() +
                            " is on cuda, and this build of specdec_kernels has no CUDA kernels, expected cpu tensors "
                            "(install a CUDA wheel, or build from source where nvcc is on the PATH)");
}

Device device_of(const Check& check) {
#ifdef SPECDEC_WITH_CUDA
  const DeviceGuard guard(check.device().device_id);
  return current_device(check.op());
#else
  throw_no_cuda(check);
#endif
}

}  // namespace specdec
