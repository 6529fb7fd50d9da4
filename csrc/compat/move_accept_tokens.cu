// move_accept_tokens on a GPU: a block handles one request and some of the 16-byte columns of all buffers.
//
// Its first warp finds the moves, one lane per path entry; then every thread moves its columns through all of them.
// Reads and writes buffers * row_bytes per moved row, after three dependent loads (lengths and path, table entries,
// pointers).
#include <algorithm>

#include "compat/move_accept_tokens.h"
#include "core/cuda.cuh"

namespace specdec::compat {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kBlocks = 2112;  // in the grid, approximately
constexpr int kRows = 4;           // loads in flight before the first store; most paths move no more rows

struct TokenMoves {
  int64_t from[kWarp], to[kWarp];
  int count;
};

// Collect the moves of request b's path entries from `first` on. Called by one whole warp.
__device__ void gather_moves(const MoveAcceptTokensParams& p, int64_t b, int64_t first, int64_t count,
                             TokenMoves& moves) {
  const unsigned lane = threadIdx.x % kWarp;
  const int64_t j = first + lane;
  const TokenMove move = j < count ? find_token_move(p, b, j) : TokenMove{};
  const unsigned all = __ballot_sync(kFullMask, move.needed);
  const int at = __popc(all & ((1u << lane) - 1));
  if (move.needed) {
    moves.from[at] = move.from;
    moves.to[at] = move.to;
  }
  if (lane == 0) moves.count = __popc(all);
}

__global__ void __launch_bounds__(kThreads) move_accept_tokens_kernel(MoveAcceptTokensParams p) {
  begin_kernel();
  __shared__ TokenMoves moves;
  const int64_t b = blockIdx.x, count = path_length(p, b);
  const auto per_row = static_cast<int>(p.row_bytes / kCopyBytes);
  const int columns = static_cast<int>(p.num_buffers) * per_row, step = static_cast<int>(gridDim.y) * kThreads;

  for (int64_t first = 0; first < count; first += kWarp) {
    if (threadIdx.x < kWarp) gather_moves(p, b, first, count, moves);
    __syncthreads();  // the moves are known
    for (int i = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x); i < columns; i += step) {
      if (moves.count == 0) break;
      char* const column = p.buffers[i / per_row] + i % per_row * kCopyBytes;
      for (int row = 0; row < moves.count; row += kRows) {
        uint4 units[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (row + r >= moves.count) break;
          units[r] = *reinterpret_cast<const uint4*>(column + moves.from[row + r]);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (row + r >= moves.count) break;
          *reinterpret_cast<uint4*>(column + moves.to[row + r]) = units[r];
        }
      }
    }
    __syncthreads();  // before the next ones are
  }
}

}  // namespace

void move_accept_tokens_cuda(const MoveAcceptTokensParams& p, Stream stream) {
  dim3 grid(grid_x("move_accept_tokens", p.batch));
  const int64_t columns = p.num_buffers * (p.row_bytes / kCopyBytes), steps = (columns + kThreads - 1) / kThreads;
  grid.y = static_cast<unsigned>(std::max<int64_t>(1, std::min({kBlocks / p.batch, steps, kMaxGridY})));
  launch("move_accept_tokens", move_accept_tokens_kernel, {.grid = grid, .threads = kThreads}, stream, p);
}

}  // namespace specdec::compat
