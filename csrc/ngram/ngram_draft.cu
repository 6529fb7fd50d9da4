// ngram_draft on a GPU: one block per row. Dependent steps and instructions that run only once take the time, so every
// step is as parallel as possible.
//
// Lookup: one warp per (n-gram, scope). Slot number, slot record and set are three dependent loads; a set is read whole
// (512 bytes), so finding an entry and reading its positions is one load. Then eight lanes take an occurrence: its
// block is one 16-byte load per lane, for 64 occurrences at a time, and so are the adjacent blocks in memory, which are
// mostly the previous and next ones of its text. These give the match and the continuation, so growing the tree reads
// nothing from memory.
//
// Tree: the tree is not grown node by node. Along a path on which no candidate leaves, log2 p decreases by a constant
// step per node: for such a segment (32 candidates have at most 63), a division gives the number of nodes above a
// bound. So bisection finds the bound that leaves enough nodes, and counting better nodes gives a node's index. A
// segment ends where one of its candidates diverges from another, so the tree needs only the common prefix length of
// any two texts; a segment belongs to its first candidate.
//
// Lower bound of the time: launch (0.55 us) and 3 dependent loads of 0.4 us each from memory, one or two more if a
// text's blocks are not adjacent or a draft is longer than a block.
// apart or a draft is longer than a block, of 0.4 us from memory.
#include "ngram/draft/candidates.cuh"
#include "ngram/draft/nodes.cuh"
#include "ngram/draft/occurrences.cuh"
#include "ngram/draft/segments.cuh"

namespace specdec::ngram {
namespace {

using namespace draft;

template <int kWords>
__global__ void __launch_bounds__(kThreads, 2) ngram_draft_kernel(NgramDraftParams p) {
  begin_kernel();
  __shared__ Row<kWords> s;
  const int64_t row = blockIdx.x;
  const auto i = static_cast<int32_t>(threadIdx.x);
  const Request request = find_request(p, row);
  if (i < kWarp) s.context[i] = request.context;
  if (i == 0) s.longest_match = s.segments = 0;
  const int rounds = find_occurrences(p, request, s);
  __syncthreads();
  const int candidates = find_candidates(p, request, rounds, s);
  int count = request.context_len > 0;
  if (candidates > 0) {
    compare_texts(request, s, candidates);
    find_segments(p, s, candidates);
    compute_logarithms(s);
    count = index_nodes(p, s);
  }

  tree::TreeHead head;
  const int32_t root = __shfl_sync(kFullMask, request.context, 0);
  if (count > 0) head = {.count = count, .root_token = root, .seq_len = p.seq_lens[row]};
  int32_t token = head.root_token, parent = -1;
  float score = i == 0 && count > 0 ? 0 : -INFINITY;
  if (i > 0 && i < count) {
    const uint32_t key = s.listed_key[s.listed[i]], rank = s.listed_rank[s.listed[i]], owner = key >> 8,
                   depth = key & 0xff, leaves = s.leaves[owner];
    const uint32_t above = depth == (leaves & 0xff) + 1 ? leaves : key - 1;
    token = s.text[owner][depth - 1];
    parent = above == 0 ? 0 : s.node_index[above >> 8][above & 0xff];
    score = ngram_score(static_cast<int32_t>(rank >> kNgramTieBits) - kNgramRankBase - s.log2_total());
  }
  if (i < p.out.nodes) p.out_scores[row * p.out.nodes + i] = score;
  __syncthreads();
  if (i >= s.nodes.kNodes) return;  // fewer threads wait at the remaining barriers
  clear_nodes(s.nodes);
  __syncthreads();
  write_nodes(p.out, row, head, token, parent, s.nodes);
  if (i == 0) {
    p.out_match_len[row] = s.longest_match;
    if (head.count > 0) {
      auto count = [](uint64_t& counter, int by) {
        atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(by));
      };
      count(p.index.header->drafts, 1);
      count(p.index.header->matches, s.longest_match > 0);
      count(p.index.header->drafted, head.count - 1);
    }
  }
}

}  // namespace

void ngram_draft_cuda(const NgramDraftParams& p, Stream stream) {
  const LaunchShape shape{.grid = grid_x("ngram_draft", p.batch), .threads = kThreads};
  if (p.out.words == 1)
    launch("ngram_draft", ngram_draft_kernel<1>, shape, stream, p);
  else
    launch("ngram_draft", ngram_draft_kernel<tree::kMaxTreeNodes / 64>, shape, stream, p);
}

}  // namespace specdec::ngram
