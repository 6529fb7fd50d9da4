// A block is a request and some of the columns of all buffers, 16 bytes each. Its first warp finds the moves, a lane an
// entry of the path, then every thread carries its columns through all of them. Reads and writes buffers * row_bytes a
// moved row each, behind three dependent reads (lengths and path, places, pointers).
#include <algorithm>

#include "compat/move_accept_tokens.h"
#include "core/cuda.cuh"

namespace specdec::compat {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kBlocks = 2112;  // of the whole grid, about
constexpr int kRows = 4;           // read before any of them is written: most paths have no more to move

struct TokenMoves {
  int64_t from[kWarp], to[kWarp];
  int count;
};

// Called by one whole warp, for entries `first` and on of request b's path.
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
  const auto per_row = static_cast<int>(p.row_bytes / kCopiedBytes);
  const int columns = static_cast<int>(p.num_buffers) * per_row, step = static_cast<int>(gridDim.y) * kThreads;

  for (int64_t first = 0; first < count; first += kWarp) {
    if (threadIdx.x < kWarp) gather_moves(p, b, first, count, moves);
    __syncthreads();  // the moves are known
    for (int i = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x); i < columns; i += step) {
      if (moves.count == 0) break;
      char* const column = p.buffers[i / per_row] + i % per_row * kCopiedBytes;
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
  const int64_t columns = p.num_buffers * (p.row_bytes / kCopiedBytes), steps = (columns + kThreads - 1) / kThreads;
  grid.y = static_cast<unsigned>(std::max<int64_t>(1, std::min({kBlocks / p.batch, steps, kMaxGridY})));
  launch("move_accept_tokens", move_accept_tokens_kernel, {.grid = grid, .threads = kThreads}, stream, p);
}

}  // namespace specdec::compat
