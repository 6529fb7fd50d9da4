// build_tree_from_parents on a GPU: given_tree.cuh's kernel with the caller's parents.
#include "tree/build_tree_from_parents.h"
#include "tree/given_tree.cuh"

namespace specdec::tree {

void build_tree_from_parents_cuda(const BuildTreeFromParentsParams& p, Stream stream) {
  start_given_tree("build_tree_from_parents", p, stream);
}

}  // namespace specdec::tree
