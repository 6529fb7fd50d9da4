// Stubs for builds without CUDA.
#include "parallel/peer_memory.h"

#ifndef SPECDEC_WITH_CUDA

#include "core/errors.h"

namespace specdec::parallel {
namespace {

[[noreturn]] void refuse() {
  throw NotImplementedError("PeerMemory: this build of specdec_kernels has no CUDA half, expected one that has");
}

}  // namespace

PeerMemory::PeerMemory(int device, int64_t, uint32_t) : device_(device), is_own_(true) { refuse(); }
PeerMemory::PeerMemory(int device, std::string_view) : device_(device), is_own_(false) { refuse(); }
PeerMemory::~PeerMemory() = default;
std::string PeerMemory::handle() const { refuse(); }
void PeerMemory::close() {}

}  // namespace specdec::parallel

#endif
