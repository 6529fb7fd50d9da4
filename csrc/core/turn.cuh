// Walking around a ring whose places have barriers (mbarrier.cuh).
#pragma once

namespace specdec {

// The place, of kPlaces or fewer, and the parity of its barrier's phase. The phase before a barrier's first counts as
// over: who waits for the parity that is not this one finds each place free on the first lap.
template <int kPlaces>
struct Turn {
  int at = 0;
  unsigned parity = 0;
  __device__ void advance(int places = kPlaces) {
    if (++at == places) {
      at = 0;
      parity ^= 1;
    }
  }
  // By up to kPlaces.
  __device__ void advance_by(int places) {
    at += places;
    if (at >= kPlaces) {
      at -= kPlaces;
      parity ^= 1;
    }
  }
};

}  // namespace specdec
