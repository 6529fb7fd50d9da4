// The kernel of tree_recurrence for trees and plain steps (CUDA only).
#pragma once

#include "recurrent/tree_recurrence.h"

namespace specdec::recurrent {

void tree_pass(const TreeRecurrenceParams& p, Stream stream);

}  // namespace specdec::recurrent
