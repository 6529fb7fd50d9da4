// Device: properties of a GPU that host code plans by.
#pragma once

namespace specdec {

struct Device {
  int num_sms;
  bool is_hopper_or_later;                          // has clusters and programmatic dependent launch
  bool has_wgmma;                                   // as Hopper alone does, and this build its instructions
  int shared_bytes_per_block, shared_bytes_per_sm;  // at most, on request
};

// Return the current CUDA device's properties (CUDA builds only).
Device current_device(const char* op);

}  // namespace specdec
