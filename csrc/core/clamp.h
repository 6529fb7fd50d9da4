// The number nearest to x that lies in [low, high].
#pragma once

#include <type_traits>

#include "core/host_device.h"

namespace specdec {

template <class T>
SD_HD T clamp_to(T x, std::type_identity_t<T> low, std::type_identity_t<T> high) {
  return x < low ? low : x > high ? high : x;
}

}  // namespace specdec
