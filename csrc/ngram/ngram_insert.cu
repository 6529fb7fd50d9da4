// One kernel adds tokens to the index, so that a round is one launch.
//
// Every block makes the same plan from the same reads: a thread a row, the planners, finds where its tokens go, and the
// blocks of the ring are given out by prefix sums over the rows. The other threads, the updaters, hash a token each in
// the meantime, which takes the rows' lengths and last tokens alone, and keep the updates of the block's own sets, in
// order; eight lanes, one for each entry, take a set into registers and apply its updates. So no update waits for
// another but in its own set, and the order is kept without a sort. While they do, the planners share out and write the
// ring's blocks, as nobody reads those. What the plan reads, slots and header, is written by the block that is the last
// to have its plan.
//
// What a row finds when its turn comes does not depend on the rows before, with exceptions that are rare (a ring so
// small that the call overwrites what it continues, a slot named twice, tokens of a slot without a stream): then one
// thread does it all, as the CPU would.
//
// A round is latency, and less of memory (slot numbers, slot records, sets, the latter on their way together, of 0.4
// us; the start takes 0.55) than of instructions: code that runs once takes four to five cycles for each. So the two
// kinds of threads have code of their own that runs at the same time, what a round never is is left out of its kernel,
// warps that have nothing to do skip what others do, and lanes of a warp go through the same code where sets differ:
// votes of some of a warp's lanes take much longer. In bulk every block hashes every token and reads it from L2.
#include "ngram/insert/planner.cuh"
#include "ngram/insert/updater.cuh"

namespace specdec::ngram {
namespace {

using namespace insert;

template <bool kIsRound>
__global__ void __launch_bounds__(kThreads, 1) ngram_insert_kernel(const __grid_constant__ NgramInsertParams given) {
  begin_kernel();
  __shared__ Plan s;
  NgramInsertParams p = given;
  if constexpr (kIsRound) {  // what a round never is: code that it does not need takes time too
    p.is_document = p.is_first = false;
    p.start = -1;
    p.left = 0;
  }
  if (warp_id() < kUpdaterWarps)
    update<kIsRound>(p, s);
  else
    plan<kIsRound>(p, given, s);
}

constexpr int kBeginThreads = 256;

__global__ void __launch_bounds__(kBeginThreads) ngram_begin_kernel(NgramBeginParams p) {
  begin_kernel();
  __shared__ unsigned ended;
  const NgramView& v = p.index;
  if (threadIdx.x == 0) ended = kNgramNone;
  __syncthreads();
  for (uint32_t slot = threadIdx.x; slot < v.num_slots && p.name != 0; slot += kBeginThreads) {
    const NgramSlot& held = v.slots[slot];
    if (ngram_resumes(held, p.name, p.group, p.is_private) && (!held.live || slot == p.slot)) atomicMin(&ended, slot);
  }
  __syncthreads();
  if (threadIdx.x == 0)
    ngram_begin(v, p.slot, ended == kNgramNone ? -1 : int64_t{ended}, p.name, p.group, p.is_private);
}

}  // namespace

void ngram_insert_cuda(const NgramInsertParams& p, Stream stream) {
  unsigned blocks = 1;
  while (blocks < kMostBlocks && 2 * blocks * kUpdatesPerBlock <= p.rows * p.width * kNgramOrders) blocks *= 2;
  const LaunchShape shape{.grid = blocks, .threads = kThreads};
  if (p.lengths != nullptr)
    launch("ngram_insert", ngram_insert_kernel<true>, shape, stream, p);
  else
    launch("ngram_insert", ngram_insert_kernel<false>, shape, stream, p);
}

void ngram_begin_cuda(const NgramBeginParams& p, Stream stream) {
  launch("ngram_begin", ngram_begin_kernel, {.grid = 1, .threads = kBeginThreads}, stream, p);
}

void ngram_release_cuda(const NgramReleaseParams& p, Stream stream) {
  SD_CUDA_CHECK("ngram_release", cudaMemsetAsync(&p.index.slots[p.slot].live, 0, sizeof(uint32_t), stream));
}

void ngram_copy_cuda(void* to, const void* from, size_t bytes, bool wait, Stream stream) {
  SD_CUDA_CHECK("ngram_index", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
  if (wait) SD_CUDA_CHECK("ngram_index", cudaStreamSynchronize(stream));
}

void ngram_zero_cuda(void* memory, size_t bytes, Stream stream) {
  SD_CUDA_CHECK("ngram_index", cudaMemsetAsync(memory, 0, bytes, stream));
}

}  // namespace specdec::ngram
