// One block a row; every step is as wide as it can be, since what takes time is steps that wait for one another, and
// instructions that are executed once each.
//
// A warp takes an n-gram of a scope: slot number, slot record and set are three loads in a row, and a set is read whole
// (512 bytes), so that finding an entry and reading its positions is one of them. Then eight lanes take a place: its
// block is one load of 16 bytes a lane, which 64 places do at the same time, and so are the blocks beside it, which are
// most often those before and behind it in its text. That tells the match, and what follows, so nothing is read from
// memory while the tree grows.
//
// Nor does the tree grow node by node. Along a path where no candidate leaves, log2 p falls by the same step from node
// to node: such a segment, of which 32 candidates have at most 63, holds as many nodes above a bound as a division
// says. So the bound that leaves enough nodes is found by bisection, and a node's number by counting what is better. A
// segment ends where one of its candidates parts from another, so what is needed of the texts is how long any two
// agree; it is that candidate's which is the first of those on it.
//
// Floor: the start (0.55 us) and 3 loads that wait for one another, one or two more where the blocks of a text lie
// apart or a draft is longer than a block, of 0.4 us from memory.
#include "ngram/draft/candidates.cuh"
#include "ngram/draft/nodes.cuh"
#include "ngram/draft/places.cuh"
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
  if (i == 0) s.longest = s.segments = 0;
  const int rounds = find_places(p, request, s);
  __syncthreads();
  const int candidates = find_candidates(p, request, rounds, s);
  int count = request.context_len > 0;
  if (candidates > 0) {
    compare_texts(request, s, candidates);
    find_segments(p, s, candidates);
    take_logarithms(s);
    count = number_nodes(p, s);
  }

  tree::TreeHead head;
  const int32_t root = __shfl_sync(kFullMask, request.context, 0);
  if (count > 0) head = {.count = count, .root_token = root, .seq_len = p.seq_lens[row]};
  int32_t token = head.root_token, parent = -1;
  float score = i == 0 && count > 0 ? 0 : -INFINITY;
  if (i > 0 && i < count) {
    const uint32_t name = s.listed_name[s.listed[i]], rank = s.listed_rank[s.listed[i]], owner = name >> 8,
                   depth = name & 0xff, leaves = s.leaves[owner];
    const uint32_t above = depth == (leaves & 0xff) + 1 ? leaves : name - 1;
    token = s.text[owner][depth - 1];
    parent = above == 0 ? 0 : s.number[above >> 8][above & 0xff];
    score = ngram_score(static_cast<int32_t>(rank >> kNgramTieBits) - kNgramRankBase - s.log2_total());
  }
  if (i < p.out.nodes) p.out_scores[row * p.out.nodes + i] = score;
  __syncthreads();
  if (i >= s.nodes.kNodes) return;  // who is left waits for fewer
  clear_nodes(s.nodes);
  __syncthreads();
  write_nodes(p.out, row, head, token, parent, s.nodes);
  if (i == 0) {
    p.out_match_len[row] = s.longest;
    if (head.count > 0) {
      auto count = [](uint64_t& counter, int by) {
        atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(by));
      };
      count(p.index.header->drafts, 1);
      count(p.index.header->matches, s.longest > 0);
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
