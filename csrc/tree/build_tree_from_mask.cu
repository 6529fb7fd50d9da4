// The kernel is given_tree.cuh's; parents come from the caller's mask.
#include "tree/build_tree_from_mask.h"
#include "tree/given_tree.cuh"

namespace specdec {

void build_tree_from_mask_cuda(const BuildTreeFromMaskParams& p, Stream stream) {
  given_tree_kernel<<<grid_x("build_tree_from_mask", p.batch), kGivenTreeThreads, 0, stream>>>(p);
  SD_LAUNCH_CHECK("build_tree_from_mask");
}

}  // namespace specdec
