// PeerMemory: memory of a GPU that processes with other GPUs of the host map (CUDA IPC).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace specdec::parallel {

class PeerMemory {
 public:
  // Allocates words on a device, all of this value.
  PeerMemory(int device, int64_t words, uint32_t value);
  // Maps the memory of another process for a device that reaches it by peer access. Throws CudaError if it cannot.
  PeerMemory(int device, std::string_view handle);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Returns what another process maps the memory by; of the process that allocated it.
  std::string handle() const;
  // Returns the address of the memory in this process; 0 once it is closed.
  int64_t address() const { return reinterpret_cast<int64_t>(memory_); }
  // Unmaps or frees the memory. All others unmap it before the process that allocated it frees it. Idempotent.
  void close();

 private:
  const int device_;
  const bool is_own_;
  void* memory_ = nullptr;
};

}  // namespace specdec::parallel
