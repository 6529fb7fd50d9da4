// build_tree_from_mask on a GPU: given_tree.cuh's kernel with parents from the caller's mask.
#include "tree/build_tree_from_mask.h"
#include "tree/given_tree.cuh"

namespace specdec::tree {

void build_tree_from_mask_cuda(const BuildTreeFromMaskParams& p, Stream stream) {
  start_given_tree("build_tree_from_mask", p, stream);
}

}  // namespace specdec::tree
