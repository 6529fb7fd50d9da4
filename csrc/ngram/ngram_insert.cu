// ngram_insert on a GPU: one kernel adds tokens to the index, so that a round is one launch.
//
// Every block computes the same plan from the same reads. Planner threads, one per row, find where its tokens go and
// assign the ring's blocks by prefix sums over the rows. Meanwhile the updater threads hash one token each, which needs
// only the rows' lengths and last tokens, and keep the updates of the block's own sets, in order; then eight lanes, one
// per entry, load a set into registers and apply its updates. So an update waits only for others in its own set, and no
// sort is needed. Meanwhile the planners divide and write the ring's blocks, which nothing reads. The last block to
// finish its plan writes the plan's inputs (slots and header).
//
// A row's plan does not depend on earlier rows, with rare exceptions (a ring so small that the call overwrites what it
// continues, a repeated slot, tokens for a slot without a stream): then one thread processes all rows sequentially, as
// the CPU does.
//
// A round is bound by latency, less of memory (slot numbers, slot records, sets in parallel: 0.4 us each; launch 0.55
// us) than of instructions: code that runs once takes four to five cycles per instruction. So the two kinds of threads
// run separate code concurrently; cases that a round cannot have are compiled out of its kernel; idle warps skip the
// others' work; and lanes of a warp run the same code for different sets, since ballots over a part of a warp take much
// longer. In bulk inserts every block hashes every token and reads it from L2.
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
  if constexpr (kIsRound) {  // a round cannot have these; compiling them out saves time
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
  while (blocks < kMaxBlocks && 2 * blocks * kUpdatesPerBlock <= p.rows * p.width * kNgramOrders) blocks *= 2;
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
