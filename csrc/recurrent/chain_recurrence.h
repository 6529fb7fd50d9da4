// The kernel of tree_recurrence for chains of bfloat16 rows (CUDA only).
#pragma once

#include "recurrent/tree_recurrence.h"

namespace specdec::recurrent {

bool chain_runs_on_tensor_cores(const TreeRecurrenceParams& p);
void chain_recurrence(const TreeRecurrenceParams& p, Stream stream);

}  // namespace specdec::recurrent
