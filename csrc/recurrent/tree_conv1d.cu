// Convolve every path of a tree, or a chain, depthwise.
//
// Both kernels are bound by bandwidth or by the latency of a few loads, one after the other: offsets of the rows, then
// the slot's metadata, then records of the pending path. A thread has 16 bytes of adjacent channels of a row, and their
// weights in registers; a warp has 32 threads of one row. Rows that are not aligned take a channel per thread.
//
// Trees: a block per request and 32 threads of channels, a warp for every few rows. The window after the pending path
// and the inputs of all nodes go to shared memory, from which a node gathers its taps. Reads each input once, and the
// window and the records that it needs; writes outputs, records and the window.
//
// Chains: a block per kTileRows rows and 128 threads of channels. Taps slide through registers; a tile reads those of
// the rows before it once more. The tile that begins a request reads and writes the window, so no block waits.
#include <algorithm>

#include "core/pack.cuh"
#include "recurrent/block_path.cuh"
#include "recurrent/tree_conv1d.h"
#include "recurrent/warp_request.cuh"

namespace specdec::recurrent {
namespace {

constexpr int kMaxWarps = 8;       // of a block of trees
constexpr int kHeld = 4;           // inputs of a thread of trees that are loaded together
constexpr int kTileThreads = 128;  // of a block of chains
constexpr int kTileRows = 32;      // of a chain
constexpr int kAhead = 4;          // rows of a chain that are loaded before they are used
constexpr int kCommitThreads = 128;

// The adjacent channels of a thread, `pack` of all packs: weights, the row's own tap first, and bias.
template <class T, int N, int kTaps>
struct Channels {
  float weight[kTaps][N], bias[N];

  __device__ void load(const TreeConv1dParams& p, int64_t pack) {
    const T* from = static_cast<const T*>(p.weight) + pack * N * p.layer.taps;
    if constexpr (kTaps < kMaxTaps) {  // taps == kTaps, so channels and taps are whole packs
      Pack<T, N> flat[kTaps];
#pragma unroll
      for (int t = 0; t < kTaps; ++t) flat[t] = reinterpret_cast<const Pack<T, N>*>(from)[t];
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int t = 0; t < kTaps; ++t) {
          const int at = n * kTaps + kTaps - 1 - t;
          weight[t][n] = to_float(flat[at / N].x[at % N]);
        }
    } else {
      const int taps = static_cast<int>(p.layer.taps);
#pragma unroll
      for (int t = 0; t < kTaps; ++t)
#pragma unroll
        for (int n = 0; n < N; ++n) weight[t][n] = t < taps ? to_float(from[n * taps + taps - 1 - t]) : 0;
    }
#pragma unroll
    for (float& b : bias) b = 0;
    if (p.bias != nullptr) unpack(static_cast<const Pack<T, N>*>(p.bias)[pack], bias);
  }

  // Add a tap to sums.
  __device__ void add(float (&sums)[N], int t, const float (&tap)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) sums[n] += weight[t][n] * tap[n];
  }

  __device__ Pack<T, N> output(const float (&sums)[N], bool silu) const {
    float out[N];
#pragma unroll
    for (int n = 0; n < N; ++n) out[n] = silu ? __fdividef(sums[n], 1 + __expf(-sums[n])) : sums[n];
    return pack_of<T>(out);
  }
};

// A thread's packs of a tensor: rows are `stride` packs apart.
template <class P>
struct Column {
  P* first;
  int64_t stride;

  __device__ P& operator[](int64_t row) const { return first[row * stride]; }
};

template <class T, int N>
struct Columns {
  using P = Pack<T, N>;
  Column<const P> x;
  Column<P> out, window, records;  // of the whole batch

  __device__ Columns(const TreeConv1dParams& p, int64_t pack)
      : x{static_cast<const P*>(p.x) + pack, p.x_stride / N},
        out{static_cast<P*>(p.out) + pack, p.out_stride / N},
        window{static_cast<P*>(p.layer.window) + pack, p.layer.channels / N},
        records{static_cast<P*>(p.layer.records) + pack, p.layer.channels / N} {}

  // Return input t, oldest first, of the window after the pending path. All lanes of the warp call it.
  __device__ P after_path(const PendingPathsView& p, const WarpRequest& r, int64_t size, int t, bool has_pack) const {
    const PendingPath& path = r.request.path;
    const int at = t + path.count;  // in the window, then in the path
    const int32_t node = at >= size ? r.node(static_cast<int>(at - size)) : 0;
    if (!has_pack) return P{};
    if (at >= size) return records[first_record(p, path.buffer, path.slot) + node];
    return r.request.is_fresh ? P{} : window[path.slot * size + at];
  }
};

// Set the status of a bad request, once, and return whether its rows are zeros.
__device__ __forceinline__ bool refuse(const TreeConv1dParams& p, const WarpRequest& r, bool is_first_block) {
  const PendingPath& path = r.request.path;
  const int32_t bits = path.bits | (r.is_bad(p.pending, p.rows) ? kBadTree : 0);
  if (bits && is_first_block && threadIdx.x == 0 && threadIdx.y == 0) set_status(p.pending.status, path.slot, bits);
  return path.slot < 0 || bits != 0;
}

template <class T, int N, int kTaps>
__global__ void __launch_bounds__(kMaxWarps* kWarp) convolve_trees(TreeConv1dParams p, unsigned channel_blocks) {
  begin_kernel();
  extern __shared__ float4 shared[];
  using P = Pack<T, N>;
  const int64_t b = blockIdx.x / channel_blocks, pack = int64_t{blockIdx.x % channel_blocks} * kWarp + threadIdx.x;
  const int warp = static_cast<int>(threadIdx.y), warps = static_cast<int>(blockDim.y);
  const int size = (kTaps < kMaxTaps ? kTaps : static_cast<int>(p.layer.taps)) - 1;
  const bool has_pack = pack < p.layer.channels / N;
  const Column<P> inputs{reinterpret_cast<P*>(shared) + threadIdx.x, kWarp};  // the window, then the nodes
  const Columns<T, N> columns(p, pack);
  Channels<T, N, kTaps> channels;
  if (has_pack) channels.load(p, pack);
  WarpRequest r{.request = load_rows_of_request(p.pending, p.rows, b)};
  const int64_t first = r.request.first;
  const int rows = r.request.rows;

  P held[kHeld];  // the first rows of the thread, in flight while metadata is loaded
#pragma unroll
  for (int n = 0; n < kHeld; ++n)
    if (const int i = warp + n * warps; i < rows && has_pack) held[n] = columns.x[first + i];
  r.load_mask(p.rows);
  r.load_slot(p.pending, p.rows, b);
  if (refuse(p, r, blockIdx.x % channel_blocks == 0)) {
    for (int i = warp; i < rows && has_pack; i += warps) columns.out[first + i] = P{};
    return;
  }
  if (rows == 0) return;

  P old[kTaps - 1];
#pragma unroll
  for (int t = 0; t < kTaps - 1; ++t)
    if (t < size && t % warps == warp) old[t] = columns.after_path(p.pending, r, size, t, has_pack);
#pragma unroll
  for (int t = 0; t < kTaps - 1; ++t)
    if (t < size && t % warps == warp) inputs[t] = old[t];
  const int64_t record = first_record(p.pending, 1 - r.request.path.buffer, r.request.path.slot);
  for (int base = warp; base < rows && has_pack; base += kHeld * warps) {
#pragma unroll
    for (int n = 0; n < kHeld; ++n)
      if (const int i = base + n * warps; i < rows && base > warp) held[n] = columns.x[first + i];
#pragma unroll
    for (int n = 0; n < kHeld; ++n) {
      const int i = base + n * warps;
      if (i >= rows) break;
      columns.records[record + i] = held[n];
      inputs[size + i] = held[n];
    }
  }
  __syncthreads();  // all inputs are in shared memory, and the window is read
#pragma unroll
  for (int t = 0; t < kTaps - 1; ++t)
    if (t < size && t % warps == warp && has_pack) columns.window[r.request.path.slot * size + t] = old[t];
  for (int i = warp; i < rows; i += warps) {
    uint64_t ancestors = r.seen_of(i) & low_bits(i);
    if (!has_pack) continue;
    float sums[N], tap[N];
#pragma unroll
    for (int n = 0; n < N; ++n) sums[n] = channels.bias[n];
    unpack(inputs[size + i], tap);
    channels.add(sums, 0, tap);
    int before = size;  // the tap that was read last, where no ancestor is left
#pragma unroll
    for (int t = 1; t < kTaps; ++t) {
      if (t > size) break;
      int at = before - 1;
      if (ancestors != 0) {
        const int node = highest_bit(ancestors);
        ancestors ^= own_bit(node, 0);
        at = size + node;
      } else {
        before = at;
      }
      unpack(inputs[at], tap);
      channels.add(sums, t, tap);
    }
    columns.out[first + i] = channels.output(sums, p.silu);
  }
}

// Return the request that has a tile, and set `tile` to its number among the request's tiles; -1: there is none.
__device__ __forceinline__ int64_t request_of_tile(const TreeConv1dParams& p, int64_t& tile) {
  for (int64_t first = 0; first <= p.pending.batch; first += kWarp) {
    const int64_t b = first + lane_id();
    int64_t tiles = 0;
    if (b <= p.pending.batch) {  // a request without rows has one, which sets its status
      const int32_t rows = load_rows_of_request(p.pending, p.rows, b).rows;
      tiles = rows == 0 ? 1 : (int64_t{rows} + kTileRows - 1) / kTileRows;
    }
    const int64_t sum = sum_up_to_lane(tiles);
    if (const unsigned later = __ballot_sync(kFullMask, tile < sum); later != 0) {
      const int lane = __ffs(static_cast<int>(later)) - 1;
      tile -= __shfl_sync(kFullMask, sum - tiles, lane);
      return first + lane;
    }
    tile -= __shfl_sync(kFullMask, sum, kWarp - 1);
  }
  return -1;
}

// Convolve rows begin to end - 1 of a request.
template <class T, int N, int kTaps>
__device__ __forceinline__ void convolve_tile(const TreeConv1dParams& p, WarpRequest& r, int64_t b, int begin, int end,
                                              const Channels<T, N, kTaps>& channels, const Columns<T, N>& columns,
                                              bool has_pack, bool is_first_block) {
  using P = Pack<T, N>;
  const int size = (kTaps < kMaxTaps ? kTaps : static_cast<int>(p.layer.taps)) - 1, rows = r.request.rows;
  const int64_t first = r.request.first;
  P next[kAhead], before[kTaps - 1];  // before: inputs before the tile, oldest first
#pragma unroll
  for (int n = 0; n < kAhead; ++n)
    if (begin + n < end && has_pack) next[n] = columns.x[first + begin + n];
  if (begin > 0) {
#pragma unroll
    for (int t = 0; t < kTaps - 1; ++t)
      if (t < size && has_pack) before[t] = columns.x[first + begin - size + t];
  }
  r.load_slot(p.pending, p.rows, b);
  if (refuse(p, r, begin == 0 && is_first_block)) {
    for (int i = begin; i < end && has_pack; ++i) columns.out[first + i] = P{};
    return;
  }
  if (rows == 0) return;
  if (begin == 0) {
#pragma unroll
    for (int t = 0; t < kTaps - 1; ++t)
      if (t < size) before[t] = columns.after_path(p.pending, r, size, t, has_pack);
    if (has_pack) {  // the window after the chain
      const int64_t window = r.request.path.slot * static_cast<int64_t>(size);
#pragma unroll
      for (int t = 0; t < kTaps - 1; ++t) {
        if (t < size && t >= rows) columns.window[window + t - rows] = before[t];
        if (t < size && rows - size + t >= 0) columns.window[window + t] = columns.x[first + rows - size + t];
      }
    }
  }
  if (!has_pack) return;

  float seen[kTaps - 1][N];  // inputs before the current row, the newest first
#pragma unroll
  for (int t = 0; t < kTaps - 1; ++t) {
#pragma unroll
    for (int n = 0; n < N; ++n) seen[t][n] = 0;
#pragma unroll
    for (int from = 0; from < kTaps - 1; ++from)
      if (from == size - 1 - t) unpack(before[from], seen[t]);
  }
  for (int base = begin; base < end; base += kAhead) {
    P current[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      current[n] = next[n];
      if (base + kAhead + n < end) next[n] = columns.x[first + base + kAhead + n];
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (base + n >= end) break;
      float input[N], sums[N];
      unpack(current[n], input);
#pragma unroll
      for (int e = 0; e < N; ++e) sums[e] = channels.bias[e];
      channels.add(sums, 0, input);
#pragma unroll
      for (int t = 1; t < kTaps; ++t) channels.add(sums, t, seen[t - 1]);
#pragma unroll
      for (int e = 0; e < N; ++e) {
#pragma unroll
        for (int t = kTaps - 2; t > 0; --t) seen[t][e] = seen[t - 1][e];
        seen[0][e] = input[e];
      }
      columns.out[first + base + n] = channels.output(sums, p.silu);
    }
  }
}

template <class T, int N, int kTaps>
__global__ void __launch_bounds__(kTileThreads, kTaps < kMaxTaps ? 3 : 2)
    convolve_chains(TreeConv1dParams p, unsigned channel_blocks) {
  begin_kernel();
  const int64_t pack = int64_t{blockIdx.x % channel_blocks} * kTileThreads + threadIdx.x;
  const bool has_pack = pack < p.layer.channels / N;
  const Columns<T, N> columns(p, pack);
  Channels<T, N, kTaps> channels;
  if (has_pack) channels.load(p, pack);
  // A second tile per block is there only if requests overlap, which bad offsets may give.
  for (int64_t n = blockIdx.x / channel_blocks;; n += gridDim.x / channel_blocks) {
    int64_t tile = n;
    const int64_t b = request_of_tile(p, tile);
    if (b < 0) return;
    WarpRequest r{.request = load_rows_of_request(p.pending, p.rows, b)};
    const int begin = static_cast<int>(tile * kTileRows), end = min(begin + kTileRows, r.request.rows);
    convolve_tile(p, r, b, begin, end, channels, columns, has_pack, blockIdx.x % channel_blocks == 0);
  }
}

template <class P>
__global__ void __launch_bounds__(kCommitThreads)
    commit_conv1d_kernel(CommitConv1dParams p, ConvLayer packs, unsigned channel_blocks) {
  begin_kernel();
  const int64_t b = blockIdx.x / channel_blocks;
  const int64_t pack = int64_t{blockIdx.x % channel_blocks} * kCommitThreads + threadIdx.x;
  const PendingPath path = load_pending(p.pending, b);
  const bool is_bad = is_bad_path(p.pending, path, static_cast<int>(threadIdx.x));
  const int32_t bits = path.bits | (is_bad ? kBadTree : 0);
  if (path.slot < 0) return;
  if (bits && blockIdx.x % channel_blocks == 0 && threadIdx.x == 0) set_status(p.pending.status, path.slot, bits);
  if (bits || path.count == 0 || pack >= packs.channels) return;
  P window[kMaxTaps - 1];
  load_window(p.pending, packs, path, false, pack, window);
  store_window(packs, path.slot, pack, window);
}

// Call f.template operator()<kTaps>() with the number of taps, or kMaxTaps for more than 4.
template <class F>
void with_taps(int64_t taps, F&& f) {
  if (taps == 4) return f.template operator()<4>();
#ifndef SPECDEC_COMPILE_CHECK
  if (taps == 2) return f.template operator()<2>();
  if (taps == 3) return f.template operator()<3>();
  f.template operator()<kMaxTaps>();
#endif
}

// Call f.template operator()<N>() with the channels of a thread.
template <class T, class F>
void with_pack(bool vectorized, F&& f) {
  if (vectorized) return f.template operator()<16 / sizeof(T)>();
#ifndef SPECDEC_COMPILE_CHECK
  f.template operator()<1>();
#endif
}

unsigned blocks_of(int64_t packs, int threads) { return static_cast<unsigned>((packs + threads - 1) / threads); }

// Return the warps of a block of trees, whose requests have this many rows on average: a few rows for each warp.
unsigned warps_of(int64_t rows) { return rows <= 1 ? 1 : rows <= 4 ? 2 : rows <= 8 ? 4 : kMaxWarps; }

template <class T, int N, int kTaps>
void launch_conv(const TreeConv1dParams& p, Stream stream) {
  const char* op = "tree_conv1d";
  const int64_t packs = p.layer.channels / N;
  if (p.rows.mask == nullptr) {
    const unsigned blocks = blocks_of(packs, kTileThreads);
    const int64_t tiles = (p.rows.rows + kTileRows - 1) / kTileRows + p.pending.batch + 1;
    return launch(op, convolve_chains<T, N, kTaps>, {.grid = grid_x(op, tiles * blocks), .threads = kTileThreads},
                  stream, p, blocks);
  }
  const unsigned blocks = blocks_of(packs, kWarp);
  const int64_t nodes = std::min(p.pending.record_nodes, p.rows.rows);
  const size_t bytes = (p.layer.taps - 1 + nodes) * kWarp * sizeof(Pack<T, N>);
  launch(op, convolve_trees<T, N, kTaps>,
         {.grid = grid_x(op, (p.pending.batch + 1) * blocks),
          .threads = dim3(kWarp, warps_of(p.rows.rows / std::max<int64_t>(p.pending.batch, 1))),
          .shared_bytes = bytes},
         stream, p, blocks);
}

}  // namespace

void tree_conv1d_cuda(const TreeConv1dParams& p, Stream stream) {
  with_float_type(p.layer.dtype, [&]<class T>() {
    with_pack<T>(p.vectorized,
                 [&]<int N>() { with_taps(p.layer.taps, [&]<int kTaps>() { launch_conv<T, N, kTaps>(p, stream); }); });
  });
}

void commit_conv1d_cuda(const CommitConv1dParams& p, Stream stream) {
  with_float_type(p.layer.dtype, [&]<class T>() {
    with_pack<T>(p.vectorized, [&]<int N>() {
      ConvLayer packs = p.layer;
      packs.channels /= N;
      const unsigned blocks = blocks_of(packs.channels, kCommitThreads);
      launch("commit_conv1d", commit_conv1d_kernel<Pack<T, N>>,
             {.grid = grid_x("commit_conv1d", p.pending.batch * blocks), .threads = kCommitThreads}, stream, p, packs,
             blocks);
    });
  });
}

}  // namespace specdec::recurrent
