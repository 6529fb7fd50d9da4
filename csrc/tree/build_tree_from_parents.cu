// The kernel is given_tree.cuh's; parents come from the caller.
#include "tree/build_tree_from_parents.h"
#include "tree/given_tree.cuh"

namespace specdec {

void build_tree_from_parents_cuda(const BuildTreeFromParentsParams& p, Stream stream) {
  given_tree_kernel<<<grid_x("build_tree_from_parents", p.batch), kGivenTreeThreads, 0, stream>>>(p);
  SD_LAUNCH_CHECK("build_tree_from_parents");
}

}  // namespace specdec
