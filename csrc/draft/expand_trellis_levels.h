// expand_trellis on a GPU, level by level: for shapes whose rows of costs do not fit into shared memory.
#pragma once

#include "draft/expand_trellis.h"

namespace specdec::draft {

void expand_trellis_levels(const ExpandTrellisParams& p, Stream stream);

}  // namespace specdec::draft
