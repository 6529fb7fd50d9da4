// One tree in smem, copied asynchronously.
#pragma once

#include <cuda_pipeline.h>

#include "verify/cluster_row.cuh"
#include "verify/verify_tree.h"

namespace specdec::verify {

struct SharedTree {
  TreeNode* nodes;     // [num_nodes]
  int32_t* positions;  // [num_nodes]

  __device__ TreeNode operator()(int32_t i) const { return nodes[i]; }

  __device__ void copy(const VerifyTreeParams& p, int64_t b) const {
    const int64_t first = b * p.links.num_nodes;
    for (int i = threadIdx.x; i < p.links.num_nodes; i += kRowThreads) {
      __pipeline_memcpy_async(&nodes[i].token, p.links.tokens + first + i, 4);
      __pipeline_memcpy_async(&nodes[i].parent, p.links.parents + first + i, 4);
      __pipeline_memcpy_async(&nodes[i].first_child, p.links.first_child + first + i, 4);
      __pipeline_memcpy_async(&nodes[i].next_sibling, p.links.next_sibling + first + i, 4);
      __pipeline_memcpy_async(&positions[i], p.positions + first + i, 4);
    }
    __pipeline_commit();
  }
  __device__ static void wait() {
    __pipeline_wait_prior(0);
    __syncthreads();
  }
};

}  // namespace specdec::verify
