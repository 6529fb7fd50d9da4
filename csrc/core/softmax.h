// What both devices' softmaxes share.
#pragma once

#include "core/host_device.h"

namespace specdec {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// x - max, where max is the largest entry of a row: 0 at the maximum also when that is +inf, so that entries of +inf
// share the whole probability and everything else gets none.
SD_HD float below_max(float x, float max) { return x == max ? 0.0f : x - max; }

}  // namespace specdec
