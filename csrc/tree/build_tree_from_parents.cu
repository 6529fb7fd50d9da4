// The kernel is given_tree.cuh's; parents come from the caller.
#include "tree/build_tree_from_parents.h"
#include "tree/given_tree.cuh"

namespace specdec::tree {

void build_tree_from_parents_cuda(const BuildTreeFromParentsParams& p, Stream stream) {
  start_given_tree("build_tree_from_parents", p, stream);
}

}  // namespace specdec::tree
