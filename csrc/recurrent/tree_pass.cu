// Run a linear recurrence over every path of trees of at most 64 nodes.
//
// One block per request, value head and slice of 64 values, one warp per 16 of them. The state is on its way to shared
// memory as soon as the slot is known; meanwhile the block computes what does not depend on it: norms, sums of decays,
// pairs, the inverse of the triangular systems. Then each warp has its rows of the state in registers, folds the
// pending path into them, writes them back, and uses them as an operand of the tensor cores; no warp waits for another
// any more.
//
// Products on tensor cores have the precision of float32: operands are split into two tf32 parts, except for 16-bit
// rows, which are exact in one. Factors of rows (normalization, decays that channels share) multiply the results. With
// a decay per channel they multiply the operands; the operand of an ancestor is divided by its decay, and where that
// could overflow, pairs are computed one by one from differences of sums.
//
// Nodes go by blocks of 16: u of a block is the inverse of its triangular system times what the state and earlier
// blocks leave of v. A request of one row has neither pairs nor a system.
#include <algorithm>
#include <string>

#include "core/copy_async.cuh"
#include "core/mma.cuh"
#include "core/warp.cuh"
#include "recurrent/float4.cuh"
#include "recurrent/tree_pass.h"

namespace specdec::recurrent {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kWarpValues = 16, kValues = kWarps * kWarpValues;
constexpr int kBlock = 16, kTile = 8;  // nodes of a triangular system, and of a product's tile
constexpr int kRecords = 6;            // of the pending path that are in shared memory together
constexpr float kMostDecay = -60;      // e^60 times e^-60 of keys stays finite, and precise
static_assert(kThreads >= kMaxNodes);

__device__ __forceinline__ float4 over(float4 a, float4 b) {
  return make_float4(__fdividef(a.x, b.x), __fdividef(a.y, b.y), __fdividef(a.z, b.z), __fdividef(a.w, b.w));
}
// Return loaded values as opaque ones: their loads are not waited for before the copies that precede this.
template <class... Values>
__device__ __forceinline__ void hold_all(Values&... values) {
#ifdef __CUDA_ARCH__
  const auto hold_one = [](auto& x) {
    if constexpr (sizeof(x) == 8)
      asm volatile("" : "+l"(x));
    else if constexpr (std::is_same_v<decltype(x), float&>)
      asm volatile("" : "+f"(x));
    else
      asm volatile("" : "+r"(x));
  };
  (hold_one(values), ...);
#endif
}
// Return the sum over the 4 lanes that share a row of a fragment.
__device__ __forceinline__ float sum_of_four_lanes(float x) {
  x += __shfl_xor_sync(kFullMask, x, 1);
  return x + __shfl_xor_sync(kFullMask, x, 2);
}

template <class T>
__device__ __forceinline__ float4 four_of(const T* from) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const float4*>(from);
  } else {
    T four[4];
    *reinterpret_cast<uint2*>(four) = *reinterpret_cast<const uint2*>(from);
    return make_float4(to_float(four[0]), to_float(four[1]), to_float(four[2]), to_float(four[3]));
  }
}
template <class T>
__device__ __forceinline__ float2 two_of(const T* from) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const float2*>(from);
  } else {
    T two[2];
    *reinterpret_cast<uint32_t*>(two) = *reinterpret_cast<const uint32_t*>(from);
    return make_float2(to_float(two[0]), to_float(two[1]));
  }
}

// Store elements `at` and `at` + 1 of a row that has `width`.
template <class T>
__device__ __forceinline__ void store_two(T* row, int at, int width, bool paired, float x, float y) {
  T two[2] = {from_float<T>(x), from_float<T>(y)};
  if (paired) {
    if (at >= width) return;
    if constexpr (sizeof(T) == 4)
      *reinterpret_cast<float2*>(row + at) = make_float2(x, y);
    else
      *reinterpret_cast<uint32_t*>(row + at) = *reinterpret_cast<uint32_t*>(two);
  } else {
    if (at < width) row[at] = two[0];
    if (at + 1 < width) row[at + 1] = two[1];
  }
}

// The part of an operand that tf32 holds, as bits, and what is left of it.
struct Split {
  uint32_t high, low;
};
__device__ __forceinline__ Split split(float x) {
  const uint32_t high = __float_as_uint(x) & 0xffffe000u;
  return {high, __float_as_uint(x - __uint_as_float(high))};
}

// A 16 x 8 fragment of A.
struct Fragment {
  uint32_t high[4], low[4];
};
__device__ __forceinline__ Fragment fragment(float a0, float a1, float a2, float a3) {
  const Split s0 = split(a0), s1 = split(a1), s2 = split(a2), s3 = split(a3);
  return {{s0.high, s1.high, s2.high, s3.high}, {s0.low, s1.low, s2.low, s3.low}};
}

// d += a b, where b may be exact in tf32, and a too.
template <bool kExactA, bool kExactB>
__device__ __forceinline__ void multiply(float (&d)[4], const Fragment& a, float b0, float b1) {
  if constexpr (kExactB) {
    mma_tf32(d, a.high, __float_as_uint(b0), __float_as_uint(b1));
    if constexpr (!kExactA) mma_tf32(d, a.low, __float_as_uint(b0), __float_as_uint(b1));
  } else {
    const Split s0 = split(b0), s1 = split(b1);
    mma_tf32(d, a.high, s0.high, s1.high);
    mma_tf32(d, a.high, s0.low, s1.low);
    mma_tf32(d, a.low, s0.high, s1.high);
  }
}

// A block's part of a head, and the thread's place in it. A fragment's row r is value 2 r of the warp's, and row r + 8
// the next value; its columns are nodes 2 t and 2 t + 1 of a tile, or channels 4 t to 4 t + 3 out of every 16, where
// r = lane / 4 and t = lane % 4.
struct Place {
  int64_t b, h, key_head;
  int first_value, num_values;  // of the head's value_dim
  int value;                    // the first of the thread's two, in the slice
  int t;
  bool begins_key_head;  // the first value head of its key head, and its first slice

  __device__ bool begins_head() const { return first_value == 0; }
};

// `sharing` value heads share a key head.
__device__ Place place_of(const RecurrentLayer& layer, unsigned slices, unsigned sharing) {
  const auto heads = static_cast<unsigned>(layer.value_heads);  // divisions of 32 bits are short
  const unsigned head = blockIdx.x / slices, slice = blockIdx.x - head * slices;
  const unsigned b = head / heads, h = head - b * heads, key_head = h / sharing;
  Place place{.b = b, .h = h, .key_head = key_head};
  place.first_value = static_cast<int>(slice) * kValues;
  place.num_values = min(static_cast<int>(layer.value_dim) - place.first_value, kValues);
  place.value = warp_id() * kWarpValues + lane_id() / 4 * 2;
  place.t = lane_id() % 4;
  place.begins_key_head = slice == 0 && h == key_head * sharing;
  return place;
}

// Two rows of the state: channels 16 m + 4 t to 16 m + 4 t + 3 for every m.
template <int kChunks>
struct StateRows {
  static constexpr int kSteps = 4 * kChunks, kScratchRow = 20;
  float4 x[kSteps], y[kSteps];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kSteps; ++m) x[m] = y[m] = make_float4(0, 0, 0, 0);
  }

  // Load the thread's rows from the slice in shared memory.
  __device__ __forceinline__ void load(const float* slice, int stride, const Place& place) {
    const float* row = slice + place.value * stride + 4 * place.t;
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      x[m] = four_of(row + 16 * m);
      y[m] = four_of(row + stride + 16 * m);
    }
  }

  // Load the thread's rows from the state of a slot, or store them; through the warp's scratch in shared memory where
  // they are not aligned.
  template <bool kStores>
  __device__ __forceinline__ void move(const RecurrentLayer& layer, const Place& place, int64_t slot, bool aligned,
                                       float* scratch) {
    const int width = static_cast<int>(layer.key_dim), channel = 4 * place.t;
    float* state = layer.state + layer.state_start(slot, place.h) + place.first_value * width;
    if (aligned) {
      float* row = state + place.value * width + channel;
      const bool has_x = place.value < place.num_values, has_y = place.value + 1 < place.num_values;
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
        const bool inside = 16 * m + channel < width;
        float4 &to_x = *reinterpret_cast<float4*>(row + 16 * m),
               &to_y = *reinterpret_cast<float4*>(row + width + 16 * m);
        if (kStores) {
          if (inside && has_x) to_x = x[m];
          if (inside && has_y) to_y = y[m];
        } else {
          x[m] = inside && has_x ? to_x : make_float4(0, 0, 0, 0);
          y[m] = inside && has_y ? to_y : make_float4(0, 0, 0, 0);
        }
      }
      return;
    }
    const int first = warp_id() * kWarpValues, row = (place.value - first) * kScratchRow + channel;
    float4 &to_x = *reinterpret_cast<float4*>(scratch + row),
           &to_y = *reinterpret_cast<float4*>(scratch + row + kScratchRow);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      if (kStores) {
        to_x = x[m];
        to_y = y[m];
        __syncwarp();
      }
#pragma unroll 1
      for (int n = lane_id(); n < kWarpValues * 16; n += kWarp) {
        const int value = first + n / 16, d = 16 * m + n % 16;
        const bool exists = value < place.num_values && d < width;
        float& copy = scratch[n / 16 * kScratchRow + n % 16];
        if (!kStores)
          copy = exists ? state[value * width + d] : 0;
        else if (exists)
          state[value * width + d] = copy;
      }
      __syncwarp();
      if (!kStores) {
        x[m] = to_x;
        y[m] = to_y;
        __syncwarp();
      }
    }
  }

  // Keep the compiler from computing parts of the state once for many uses, which registers do not hold.
  __device__ __forceinline__ void hold() {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int m = 0; m < kSteps; ++m)
      asm volatile(""
                   : "+f"(x[m].x), "+f"(x[m].y), "+f"(x[m].z), "+f"(x[m].w), "+f"(y[m].x), "+f"(y[m].y), "+f"(y[m].z),
                     "+f"(y[m].w));
#endif
  }
};

// Rows of a tree, records of a pending path, and for small trees a slice of the state, in shared memory. Channels
// beyond key_dim are 0. Rows are padded so that a fragment's loads read from different banks.
template <class T, int kChunks, bool kByChannel, bool kDelta, int kNodes>
struct SharedTree {
  static constexpr int kWidth = 64 * kChunks, kRow = kWidth + 16, kDecayRow = kWidth + 16;
  static constexpr int kStateRow = kWidth + 8, kValueRow = kValues + 16 / static_cast<int>(sizeof(T));
  static constexpr bool kStaged = kNodes > 0;
  static constexpr bool kExact = sizeof(T) == 2 && !kByChannel;  // keys and queries are exact in tf32

  float* state;   // [kValues, kStateRow], where kStaged
  float4* u;      // [kWarps, padded / kTile, kWarp]: each thread's fragments of u, where there may be several blocks
  T *q, *k;       // [padded, kRow], as they are given
  T* v;           // [padded, kValueRow]
  float* decays;  // by channel, [padded, kDecayRow]: sums along paths, then e to them
  // [padded, pair_row]: e^{G_i - G_j} q_i . k_j where i sees j, else 0.
  float* of_queries;
  // [padded, pair_row]: -beta_i e^{G_i - G_j} k_i . k_j for ancestors j, else 0; on the diagonal, inverses of systems.
  float* of_keys;
  float *record_k, *record_u;         // [kRecords, kWidth], [kRecords, kValues]
  float *record_decays, *last_decay;  // by channel, [kRecords, kWidth], and [kWidth] of the path's last node
  float* record_g;                    // [kMaxNodes]
  int* path;                          // [kMaxNodes]
  uint64_t* seen;                     // [padded]: nodes that a node sees, itself included; 0 for padding
  float *g, *beta, *own_g, *q_factor, *k_factor;  // [padded]; g: sums along paths
  int padded, pair_row;
  size_t bytes;

  // kNodes is a constant number of nodes that suffices, or 0.
  SD_HD SharedTree(char* memory, int nodes)
      : padded(kNodes > 0 ? kNodes : (nodes + kBlock - 1) / kBlock * kBlock), pair_row(padded + 8) {
    size_t at = 0;
    const auto take = [&]<class Element>(Element*& array, int64_t count) {
      array = reinterpret_cast<Element*>(memory + at);
      at += (static_cast<size_t>(count) * sizeof(Element) + 15) / 16 * 16;
    };
    take(state, kStaged ? kValues * kStateRow : 0);
    take(u, kStaged ? 0 : padded / kTile * kThreads);
    take(q, padded * kRow);
    take(k, padded * kRow);
    take(v, padded * kValueRow);
    take(decays, kByChannel ? padded * kDecayRow : 0);
    take(of_queries, padded * pair_row);
    take(of_keys, kDelta ? padded * pair_row : 0);
    take(record_k, kRecords * kWidth);
    take(record_u, kRecords * kValues);
    take(record_decays, kByChannel ? kRecords * kWidth : 0);
    take(last_decay, kByChannel ? kWidth : 0);
    take(record_g, kMaxNodes);
    take(path, kMaxNodes);
    take(seen, padded);
    for (float** array : {&g, &beta, &own_g, &q_factor, &k_factor}) take(*array, padded);
    bytes = at;
  }

  __device__ float4& fragment_of_u(int tile) const {
    return u[(warp_id() * (padded / kTile) + tile) * kWarp + lane_id()];
  }

  // Return the warp's scratch: its rows of the state that are in registers by then, or its fragments of u before there
  // are any.
  __device__ float* scratch() const {
    static_assert(kWarpValues * StateRows<kChunks>::kScratchRow <= 4 * kTile / 2 * kWarp);
    return kStaged ? state + warp_id() * kWarpValues * kStateRow
                   : reinterpret_cast<float*>(&fragment_of_u(0) - lane_id());
  }
};

// Start to copy rows of `width` elements to rows of kWidth, which end in zeros; row_of(i) is row i.
template <int kWidth, class T, class RowOf>
__device__ __forceinline__ void copy_rows_of(T* to, int stride, int count, int width, bool aligned, RowOf&& row_of) {
  if (!aligned) {
#pragma unroll 1
    for (int n = threadIdx.x; n < count * kWidth; n += kThreads) {
      const int i = n / kWidth, d = n % kWidth;
      to[i * stride + d] = d < width ? row_of(i)[d] : T{};
    }
    return;
  }
  constexpr int kFours = kWidth / 4, kRows = kThreads / kFours, kUnroll = kWidth >= 64 ? 4 : 1;  // rows of the block
  const int d = static_cast<int>(threadIdx.x) % kFours * 4, first = static_cast<int>(threadIdx.x) / kFours;
  T* four = to + first * stride + d;
  if (d < width) {
#pragma unroll kUnroll
    for (int i = first; i < count; i += kRows)
      copy_bytes_async<4 * sizeof(T)>(four + (i - first) * stride, row_of(i) + d);
  } else {
#pragma unroll 1
    for (int i = first; i < count; i += kRows, four += kRows * stride) {
      if constexpr (sizeof(T) == 4)
        *reinterpret_cast<float4*>(four) = make_float4(0, 0, 0, 0);
      else
        *reinterpret_cast<uint2*>(four) = make_uint2(0, 0);
    }
  }
}

// Start to copy the block's slice of a slot's state.
template <class Tree>
__device__ void copy_state(const TreeRecurrenceParams& p, const Place& place, int64_t slot, const Tree& tree) {
  const int width = static_cast<int>(p.layer.key_dim);
  const float* state = p.layer.state + p.layer.state_start(slot, place.h) + place.first_value * width;
  copy_rows_of<Tree::kWidth>(tree.state, Tree::kStateRow, place.num_values, width, p.aligned_state,
                             [&](int value) { return state + value * width; });
}

// Start to copy the rows of a tree.
template <class T, int kChunks, bool kByChannel, bool kDelta, int kNodes>
__device__ void copy_rows(const TreeRecurrenceParams& p, const Place& place, int64_t first_row, int count,
                          const SharedTree<T, kChunks, kByChannel, kDelta, kNodes>& tree) {
  using Tree = SharedTree<T, kChunks, kByChannel, kDelta, kNodes>;
  const int width = static_cast<int>(p.layer.key_dim);
  const T* q = static_cast<const T*>(p.q) + first_row * p.q_strides.row + place.key_head * p.q_strides.head;
  const T* k = static_cast<const T*>(p.k) + first_row * p.k_strides.row + place.key_head * p.k_strides.head;
  const T* v =
      static_cast<const T*>(p.v) + first_row * p.v_strides.row + place.h * p.v_strides.head + place.first_value;
  copy_rows_of<Tree::kWidth>(tree.k, Tree::kRow, count, width, p.aligned_rows,
                             [&](int i) { return k + i * p.k_strides.row; });
  copy_rows_of<Tree::kWidth>(tree.q, Tree::kRow, count, width, p.aligned_rows,
                             [&](int i) { return q + i * p.q_strides.row; });
  copy_rows_of<kValues>(tree.v, Tree::kValueRow, count, place.num_values, p.aligned_values,
                        [&](int i) { return v + i * p.v_strides.row; });
  if constexpr (kByChannel) {
    const float* g = p.g + first_row * p.g_strides.row + place.h * p.g_strides.head;
    copy_rows_of<Tree::kWidth>(tree.decays, Tree::kDecayRow, count, width, p.aligned_state,
                               [&](int i) { return g + i * p.g_strides.row; });
  }
}

// Return the first element of the record of a key, and of decays.
__device__ __forceinline__ float* key_record(const RecurrentLayer& layer, const Place& place, int64_t record) {
  return layer.k_records + (record * layer.key_heads + place.key_head) * layer.key_dim;
}
__device__ __forceinline__ float* decay_record(const RecurrentLayer& layer, const Place& place, int64_t record) {
  return layer.g_records + layer.g_start(record, place.h);
}

// Start to copy up to kRecords records of a pending path, from entry `first` on.
template <class T, int kChunks, bool kByChannel, bool kDelta, int kNodes>
__device__ void copy_records(const TreeRecurrenceParams& p, const Place& place, const PendingPath& path, int first,
                             const SharedTree<T, kChunks, kByChannel, kDelta, kNodes>& tree) {
  using Tree = SharedTree<T, kChunks, kByChannel, kDelta, kNodes>;
  const RecurrentLayer& layer = p.layer;
  const int width = static_cast<int>(layer.key_dim), count = min(path.count - first, kRecords);
  const int64_t buffer = first_record(p.pending, path.buffer, path.slot);
  const int* nodes = tree.path + first;
  copy_rows_of<Tree::kWidth>(tree.record_k, Tree::kWidth, count, width, p.aligned_state,
                             [&](int j) { return key_record(layer, place, buffer + nodes[j]); });
#pragma unroll 1
  for (int n = threadIdx.x; n < count * kValues; n += kThreads) {
    const int j = n / kValues, value = n % kValues;
    const float* u = layer.u_records + layer.u_start(buffer + nodes[j], place.h) + place.first_value;
    if (value < place.num_values) copy_bytes_async<4>(tree.record_u + n, u + value);
  }
  if constexpr (kByChannel) {
    const int last = first == 0 ? tree.path[path.count - 1] : 0;
    copy_rows_of<Tree::kWidth>(tree.record_decays, Tree::kWidth, count, width, p.aligned_state,
                               [&](int j) { return decay_record(layer, place, buffer + nodes[j]); });
    copy_rows_of<Tree::kWidth>(tree.last_decay, 0, first == 0 ? 1 : 0, width, p.aligned_state,
                               [&](int) { return decay_record(layer, place, buffer + last); });
  } else {
    const int j = static_cast<int>(threadIdx.x);
    if (first == 0 && j < path.count)
      copy_bytes_async<4>(tree.record_g + j, decay_record(layer, place, buffer + nodes[j]));
  }
}

// Fold the pending path into the state. Its first records are in shared memory.
template <class T, int kChunks, bool kByChannel, bool kDelta, int kNodes>
__device__ __forceinline__ void fold_path(const TreeRecurrenceParams& p, const Place& place, const PendingPath& path,
                                          const SharedTree<T, kChunks, kByChannel, kDelta, kNodes>& tree,
                                          StateRows<kChunks>& state) {
  using Tree = SharedTree<T, kChunks, kByChannel, kDelta, kNodes>;
  for (int first = 0; first < path.count; first += kRecords) {
    const int count = min(path.count - first, kRecords);
    if (first > 0) {
      __syncthreads();  // the records before are folded
      copy_records(p, place, path, first, tree);
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();
    }
    if constexpr (kByChannel) {
#pragma unroll 1
      for (int n = threadIdx.x; n < count * (Tree::kWidth / 4); n += kThreads) {
        const int at = 4 * n, d = at % Tree::kWidth;
        float4& k = *reinterpret_cast<float4*>(tree.record_k + at);
        k = times(k, decay4(four_of(tree.last_decay + d), four_of(tree.record_decays + at)));
      }
      __syncthreads();
    }
    if (first == 0) {
      const float all = kByChannel ? 1 : expf(tree.record_g[path.count - 1]);
#pragma unroll
      for (int m = 0; m < state.kSteps; ++m) {
        float4 factors = make_float4(all, all, all, all);
        if constexpr (kByChannel) factors = exp4(four_of(tree.last_decay + 16 * m + 4 * place.t));
        state.x[m] = times(state.x[m], factors);
        state.y[m] = times(state.y[m], factors);
      }
    }
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      float2 u = two_of(tree.record_u + j * kValues + place.value);
      if constexpr (!kByChannel) {
        const float weight = decay(tree.record_g[path.count - 1], tree.record_g[first + j]);
        u.x *= weight;
        u.y *= weight;
      }
#pragma unroll
      for (int m = 0; m < state.kSteps; ++m) {
        const float4 k = four_of(tree.record_k + j * Tree::kWidth + 16 * m + 4 * place.t);
        add_scaled(state.x[m], k, u.x);
        add_scaled(state.y[m], k, u.y);
      }
    }
  }
}

// Compute the factors that normalize rows, and sum decays that channels share along paths.
template <class T, int kChunks, bool kByChannel, bool kDelta, int kNodes>
__device__ void compute_factors(const TreeRecurrenceParams& p, int count,
                                const SharedTree<T, kChunks, kByChannel, kDelta, kNodes>& tree) {
  using Tree = SharedTree<T, kChunks, kByChannel, kDelta, kNodes>;
  const int t = lane_id() % 4;
  for (int base = 0; base < count; base += kThreads / 4) {  // all lanes of a warp take part in its sums
    const int i = base + static_cast<int>(threadIdx.x) / 4;
    float q_squares = 0, k_squares = 0;
    if (p.normalizes && i < count) {
#pragma unroll
      for (int m = 0; m < 4 * kChunks; ++m) {
        const float4 q = four_of(tree.q + i * Tree::kRow + 16 * m + 4 * t);
        const float4 k = four_of(tree.k + i * Tree::kRow + 16 * m + 4 * t);
        q_squares += dot(q, q);
        k_squares += dot(k, k);
      }
    }
    q_squares = sum_of_four_lanes(q_squares);
    k_squares = sum_of_four_lanes(k_squares);
    if (t != 0 || i >= count) continue;
    tree.q_factor[i] = p.normalizes ? p.scale / sqrtf(q_squares + p.l2norm_eps) : p.scale;
    tree.k_factor[i] = p.normalizes ? 1 / sqrtf(k_squares + p.l2norm_eps) : 1;
    if constexpr (!kByChannel) {
      float sum = 0;
      for (uint64_t left = tree.seen[i]; left != 0; left &= left - 1)
        sum += tree.own_g[__ffsll(static_cast<long long>(left)) - 1];
      tree.g[i] = sum;
    }
  }
}

// Sum decays by channel along paths. Return whether e to minus any of the thread's sums is small enough for products.
template <class Tree>
__device__ bool sum_decays(const Tree& tree, int count) {
  float least = 0;
  for (int d = threadIdx.x; d < Tree::kWidth; d += kThreads)
    for (int i = 0; i < count; ++i) {
      const uint64_t ancestors = tree.seen[i] & low_bits(i);
      float& own = tree.decays[i * Tree::kDecayRow + d];
      if (ancestors != 0) own += tree.decays[highest_bit(ancestors) * Tree::kDecayRow + d];
      least = fminf(least, own == own ? own : -INFINITY);
    }
  return least >= kMostDecay;
}

template <class Tree>
__device__ void exponentiate_decays(const Tree& tree, int count) {
  for (int d = threadIdx.x; d < Tree::kWidth; d += kThreads)
    for (int i = 0; i < count; ++i) {
      float& x = tree.decays[i * Tree::kDecayRow + d];
      x = expf(x);
    }
}

// Store the record of the key and the decays of each node.
template <class T, int kChunks, bool kByChannel, bool kDelta, int kNodes>
__device__ void store_records(const TreeRecurrenceParams& p, const Place& place, const PendingPath& path, int count,
                              const SharedTree<T, kChunks, kByChannel, kDelta, kNodes>& tree) {
  using Tree = SharedTree<T, kChunks, kByChannel, kDelta, kNodes>;
  const RecurrentLayer& layer = p.layer;
  const int width = static_cast<int>(layer.key_dim);
  const int64_t buffer = first_record(p.pending, 1 - path.buffer, path.slot);
  if (place.begins_key_head || (kByChannel && place.begins_head())) {
#pragma unroll 1
    for (int i = warp_id(); i < count; i += kWarps)
#pragma unroll 1
      for (int d = 4 * lane_id(); d < width; d += 4 * kWarp) {
        const T* k = tree.k + i * Tree::kRow + d;
        const float* decays = tree.decays + i * Tree::kDecayRow + d;
        float* to_k = key_record(layer, place, buffer + i) + d;
        float* to_g = decay_record(layer, place, buffer + i) + d;
        if (p.aligned_state) {
          if (place.begins_key_head) *reinterpret_cast<float4*>(to_k) = scaled(four_of(k), tree.k_factor[i]);
          if (kByChannel) *reinterpret_cast<float4*>(to_g) = four_of(decays);
          continue;
        }
#pragma unroll 1
        for (int e = 0; e < 4 && d + e < width; ++e) {
          if (place.begins_key_head) to_k[e] = to_float(k[e]) * tree.k_factor[i];
          if (kByChannel) to_g[e] = decays[e];
        }
      }
  }
  const int i = static_cast<int>(threadIdx.x);
  if (!kByChannel && place.begins_head() && i < count) *decay_record(layer, place, buffer + i) = tree.g[i];
}

// Store the pairs of a thread's node i and nodes j and j + 1, from products without factors.
template <class Tree>
__device__ __forceinline__ void store_pairs(const Tree& tree, bool of_keys, bool by_channel, int i, int j, float x,
                                            float y) {
  const uint64_t seen = of_keys ? tree.seen[i] & low_bits(i) : tree.seen[i];
  const float factor = of_keys ? -tree.beta[i] * tree.k_factor[i] : tree.q_factor[i];
  float two[2] = {x, y};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float weight = by_channel ? 1 : decay(tree.g[i], tree.g[j + e]);
    two[e] = seen >> (j + e) & 1 ? two[e] * factor * tree.k_factor[j + e] * weight : 0;
  }
  float* to = (of_keys ? tree.of_keys : tree.of_queries) + i * tree.pair_row + j;
  *reinterpret_cast<float2*>(to) = make_float2(two[0], two[1]);
}

// Multiply pairs on tensor cores: a warp computes 16 nodes' pairs with 8 others. With decays by channel, `tree.decays`
// has e to their sums.
template <class T, int kChunks, bool kByChannel, bool kDelta, int kNodes>
__device__ void multiply_pairs(const Place& place, const SharedTree<T, kChunks, kByChannel, kDelta, kNodes>& tree) {
  using Tree = SharedTree<T, kChunks, kByChannel, kDelta, kNodes>;
  const int r = lane_id() / 4, t = place.t;
  int task = 0;
  for (int first = 0; first < tree.padded; first += kBlock)
    for (int other = 0; other < first + kBlock; other += kTile)
      for (int of_keys = 0; of_keys < (kDelta ? 2 : 1); ++of_keys) {
        if (task++ % kWarps != warp_id()) continue;
        const T* rows = of_keys ? tree.k : tree.q;
        float sums[2][4] = {};
#pragma unroll 4
        for (int m = 0; m < 4 * kChunks; ++m) {
          const int d = 16 * m + 4 * t;
          float4 upper = four_of(rows + (first + r) * Tree::kRow + d);
          float4 lower = four_of(rows + (first + r + 8) * Tree::kRow + d);
          float4 keys = four_of(tree.k + (other + r) * Tree::kRow + d);
          if constexpr (kByChannel) {
            upper = times(upper, four_of(tree.decays + (first + r) * Tree::kDecayRow + d));
            lower = times(lower, four_of(tree.decays + (first + r + 8) * Tree::kDecayRow + d));
            keys = over(keys, four_of(tree.decays + (other + r) * Tree::kDecayRow + d));
          }
          multiply<Tree::kExact, Tree::kExact>(sums[0], fragment(upper.x, lower.x, upper.y, lower.y), keys.x, keys.y);
          multiply<Tree::kExact, Tree::kExact>(sums[1], fragment(upper.z, lower.z, upper.w, lower.w), keys.z, keys.w);
        }
        const int j = other + 2 * t;
        store_pairs(tree, of_keys, kByChannel, first + r, j, sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]);
        store_pairs(tree, of_keys, kByChannel, first + r + 8, j, sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]);
      }
}

// Multiply pairs one by one, with decays by channel that are too strong to be divided by.
template <class Tree>
__device__ void multiply_pairs_of_strong_decays(const Tree& tree, int count) {
#pragma unroll 1
  for (int n = threadIdx.x; n < count * tree.padded / 2; n += kThreads) {
    const int i = n / (tree.padded / 2), first = n % (tree.padded / 2) * 2;
    float qk[2] = {}, kk[2] = {};
    for (int e = 0; e < 2; ++e) {
      const int j = first + e;
      if (!(tree.seen[i] >> j & 1)) continue;
      for (int d = 0; d < Tree::kWidth; d += 4) {
        const float4 weights =
            decay4(four_of(tree.decays + i * Tree::kDecayRow + d), four_of(tree.decays + j * Tree::kDecayRow + d));
        const float4 earlier = times(four_of(tree.k + j * Tree::kRow + d), weights);
        qk[e] += dot(four_of(tree.q + i * Tree::kRow + d), earlier);
        kk[e] += dot(four_of(tree.k + i * Tree::kRow + d), earlier);
      }
    }
    store_pairs(tree, false, true, i, first, qk[0], qk[1]);
    store_pairs(tree, true, true, i, first, kk[0], kk[1]);
  }
}

// Invert the systems of all blocks in place, a warp per block and a lane per column.
template <class Tree>
__device__ void invert_systems(const Tree& tree) {
  for (int first = warp_id() * kBlock; first < tree.padded; first += kWarps * kBlock) {
    float* system = tree.of_keys + first * tree.pair_row + first;
    const int column = lane_id() % kBlock;
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      x[i] = i == column ? 1 : 0;
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 factors = four_of(system + i * tree.pair_row + j);
        x[i] += factors.x * x[j];
        if (j + 1 < i) x[i] += factors.y * x[j + 1];
        if (j + 2 < i) x[i] += factors.z * x[j + 2];
        if (j + 3 < i) x[i] += factors.w * x[j + 3];
      }
    }
    __syncwarp();
    if (lane_id() >= kBlock) continue;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) system[i * tree.pair_row + column] = x[i];
  }
}

// Add a fragment of nodes first_of_b.. times rows of pairs: sums [tile of nodes i] += u_j pairs_ij over 8 nodes j.
template <int kTiles, class Tree>
__device__ __forceinline__ void add_pairs(float (&sums)[kTiles][4], const Fragment& u, const Tree& tree,
                                          const float* pairs, int first, int j) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float2 factors =
        two_of(pairs + (first + n * kTile + lane_id() / 4) * tree.pair_row + j + 2 * (lane_id() % 4));
    multiply<false, false>(sums[n], u, factors.x, factors.y);
  }
}

// Compute u and the outputs of up to kTiles * 8 nodes from node `first` on, a multiple of kBlock.
template <int kTiles, class T, int kChunks, bool kByChannel, bool kDelta, int kNodes>
__device__ __forceinline__ void compute_block(const TreeRecurrenceParams& p, const Place& place, const Request& request,
                                              const SharedTree<T, kChunks, kByChannel, kDelta, kNodes>& tree,
                                              const StateRows<kChunks>& state, int first) {
  using Tree = SharedTree<T, kChunks, kByChannel, kDelta, kNodes>;
  const RecurrentLayer& layer = p.layer;
  const int r = lane_id() / 4, t = place.t, count = request.rows;
  float u[kTiles][4] = {}, out[kTiles][4] = {};
#pragma unroll
  for (int m = 0; m < state.kSteps; ++m) {
    const Fragment a = fragment(state.x[m].x, state.y[m].x, state.x[m].y, state.y[m].y);
    const Fragment b = fragment(state.x[m].z, state.y[m].z, state.x[m].w, state.y[m].w);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int i = first + n * kTile + r, d = 16 * m + 4 * t;
      float4 q = four_of(tree.q + i * Tree::kRow + d), weights;
      if constexpr (kByChannel) {
        weights = four_of(tree.decays + i * Tree::kDecayRow + d);
        q = times(q, weights);
      }
      multiply<false, Tree::kExact>(out[n], a, q.x, q.y);
      multiply<false, Tree::kExact>(out[n], b, q.z, q.w);
      if constexpr (kDelta) {
        float4 k = four_of(tree.k + i * Tree::kRow + d);
        if constexpr (kByChannel) k = times(k, weights);
        multiply<false, Tree::kExact>(u[n], a, k.x, k.y);
        multiply<false, Tree::kExact>(u[n], b, k.z, k.w);
      }
    }
  }

#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {  // node of the thread
      const int i = first + n * kTile + 2 * t + e;
      const bool exists = i < count;
      const float weight = kByChannel || !exists ? 1 : expf(tree.g[i]);
      const float of_query = exists ? weight * tree.q_factor[i] : 0;
      out[n][e] *= of_query;
      out[n][2 + e] *= of_query;
      const float2 v = two_of(tree.v + i * Tree::kValueRow + place.value);
      float rest[2] = {v.x, v.y};
      if (kDelta && p.delta_rule && exists) {
        const float of_key = weight * tree.k_factor[i];
        rest[0] -= of_key * u[n][e];
        rest[1] -= of_key * u[n][2 + e];
      }
      u[n][e] = exists ? tree.beta[i] * rest[0] : 0;
      u[n][2 + e] = exists ? tree.beta[i] * rest[1] : 0;
    }

  const bool solves = kDelta && p.delta_rule;
  for (int j = 0; j < first; j += kTile) {
    const float4 earlier = tree.fragment_of_u(j / kTile);
    const Fragment a = fragment(earlier.x, earlier.z, earlier.y, earlier.w);
    if constexpr (kDelta)
      if (solves) add_pairs(u, a, tree, tree.of_keys, first, j);
    add_pairs(out, a, tree, tree.of_queries, first, j);
  }
  if constexpr (kDelta) {
    if (solves) {
      float solved[kTiles][4] = {};
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        add_pairs(solved, fragment(u[n][0], u[n][2], u[n][1], u[n][3]), tree, tree.of_keys, first, first + n * kTile);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) u[n][e] = first + n * kTile + 2 * t + e % 2 < count ? solved[n][e] : 0;
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    add_pairs(out, fragment(u[n][0], u[n][2], u[n][1], u[n][3]), tree, tree.of_queries, first, first + n * kTile);
    if (first + kBlock < count) tree.fragment_of_u(first / kTile + n) = make_float4(u[n][0], u[n][1], u[n][2], u[n][3]);
  }

  const int64_t buffer = first_record(p.pending, 1 - request.path.buffer, request.path.slot);
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = first + n * kTile + 2 * t + e;
      if (i >= count) continue;
      T* to = static_cast<T*>(p.out) + (request.first + i) * p.out_strides.row + place.h * p.out_strides.head;
      store_two(to + place.first_value, place.value, place.num_values, p.paired_values, out[n][e], out[n][2 + e]);
      store_two(layer.u_records + layer.u_start(buffer + i, place.h) + place.first_value, place.value, place.num_values,
                p.paired_values, u[n][e], u[n][2 + e]);
    }
}

// Compute the output and the records of a request's only row.
template <class T, int kChunks, bool kByChannel, bool kDelta, int kNodes>
__device__ __forceinline__ void compute_row(const TreeRecurrenceParams& p, const Place& place, const Request& request,
                                            const SharedTree<T, kChunks, kByChannel, kDelta, kNodes>& tree,
                                            const StateRows<kChunks>& state) {
  const RecurrentLayer& layer = p.layer;
  float q_squares = 0, k_squares = 0, both = 0, of_q[2] = {}, of_k[2] = {};
#pragma unroll
  for (int m = 0; m < state.kSteps; ++m) {
    const int d = 16 * m + 4 * place.t;
    float4 q = four_of(tree.q + d), k = four_of(tree.k + d);
    q_squares += dot(q, q);
    k_squares += dot(k, k);
    both += dot(q, k);
    if constexpr (kByChannel) {
      const float4 weights = exp4(four_of(tree.decays + d));
      q = times(q, weights);
      k = times(k, weights);
    }
    of_q[0] += dot(state.x[m], q);
    of_q[1] += dot(state.y[m], q);
    if constexpr (kDelta) {
      of_k[0] += dot(state.x[m], k);
      of_k[1] += dot(state.y[m], k);
    }
  }
  both = sum_of_four_lanes(both);
  float q_factor = p.scale, k_factor = 1;
  if (p.normalizes) {
    q_factor /= sqrtf(sum_of_four_lanes(q_squares) + p.l2norm_eps);
    k_factor /= sqrtf(sum_of_four_lanes(k_squares) + p.l2norm_eps);
  }
  const float weight = kByChannel ? 1 : expf(tree.own_g[0]);
  const float2 v = two_of(tree.v + place.value);
  float u[2] = {v.x, v.y}, out[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    of_q[e] = sum_of_four_lanes(of_q[e]);
    of_k[e] = sum_of_four_lanes(of_k[e]);
    if (kDelta && p.delta_rule) u[e] -= weight * k_factor * of_k[e];
    u[e] *= tree.beta[0];
    out[e] = weight * q_factor * of_q[e] + q_factor * k_factor * both * u[e];
  }
  const int64_t record = first_record(p.pending, 1 - request.path.buffer, request.path.slot);
  if (place.t == 0) {
    T* to = static_cast<T*>(p.out) + request.first * p.out_strides.row + place.h * p.out_strides.head;
    store_two(to + place.first_value, place.value, place.num_values, p.paired_values, out[0], out[1]);
  } else if (place.t == 1) {
    store_two(layer.u_records + layer.u_start(record, place.h) + place.first_value, place.value, place.num_values,
              p.paired_values, u[0], u[1]);
  }
  if (!place.begins_head()) return;
  const int width = static_cast<int>(layer.key_dim);
#pragma unroll 1
  for (int d = threadIdx.x; d < width; d += kThreads) {
    if (place.begins_key_head) key_record(layer, place, record)[d] = k_factor * to_float(tree.k[d]);
    if (kByChannel) decay_record(layer, place, record)[d] = tree.decays[d];
  }
  if (!kByChannel && threadIdx.x == 0) *decay_record(layer, place, record) = tree.own_g[0];
}

template <class T>
__device__ void zero_rows(const TreeRecurrenceParams& p, const Place& place, const Request& request) {
  T* out = static_cast<T*>(p.out) + request.first * p.out_strides.row + place.h * p.out_strides.head;
  for (int64_t i = warp_id(); i < request.rows; i += kWarps)
    for (int value = lane_id(); value < place.num_values; value += kWarp)
      out[i * p.out_strides.row + place.first_value + value] = T{};
}

template <class T, int kChunks, bool kByChannel, bool kDelta, int kNodes>
__global__ void __launch_bounds__(kThreads, kChunks == 4                ? 2
                                            : kNodes > 0 && !kByChannel ? 4
                                                                        : 3)
    tree_pass_kernel(TreeRecurrenceParams p, unsigned slices, unsigned sharing, int capacity) {
  begin_kernel();
  extern __shared__ float4 shared[];
  const SharedTree<T, kChunks, kByChannel, kDelta, kNodes> tree(reinterpret_cast<char*>(shared), capacity);
  const Place place = place_of(p.layer, slices, sharing);
  const int thread = static_cast<int>(threadIdx.x);

  // Loads that do not depend on each other are in flight together.
  const int64_t batch = p.pending.batch;
  const bool is_padding = place.b >= batch;
  const int32_t* given = p.pending.slots != nullptr && !is_padding ? p.pending.slots + place.b : p.rows.cu_seqlens;
  int32_t given_slot = *given, begin = p.rows.cu_seqlens[place.b];
  int32_t end = p.rows.cu_seqlens[is_padding ? place.b : place.b + 1];
  hold_all(given_slot, begin, end);
  Request request = rows_of_request(p.rows, place.b, begin, is_padding ? static_cast<int32_t>(p.rows.rows) : end);
  const int64_t slot = is_padding                   ? -1
                       : p.pending.slots == nullptr ? place.b
                                                    : valid_slot(given_slot, p.pending.num_slots);
  if (slot < 0) return zero_rows<T>(p, place, request);
  SlotWords words = load_slot_words(p.pending, p.rows.prefix_lens, slot);
  const int32_t* nodes = p.pending.nodes + slot * p.pending.path_width;
  const bool in_width = thread < min(p.pending.path_width, int64_t{kMaxNodes});
  int32_t node = in_width ? nodes[thread] : 0, before = in_width && thread > 0 ? nodes[thread - 1] : -1;
  const int count = min(request.rows, capacity);
  const int64_t row = request.first + thread;
  uint64_t seen = 0;
  float beta = 1, own_g = 0;
  if (thread < count) {
    seen = mask_word(p.rows, request, thread);
    if (p.beta != nullptr) beta = p.beta[row * p.beta_stride + place.h];
    if (!kByChannel) own_g = p.g[row * p.g_strides.row + place.h * p.g_strides.head];
  }
  copy_rows(p, place, request.first, count, tree);
  commit_copies();
  StateRows<kChunks> state;
  if constexpr (tree.kStaged)
    copy_state(p, place, slot, tree);
  else if (count == 1)
    state.template move<false>(p.layer, place, slot, p.aligned_state, tree.scratch());
  commit_copies();

  hold_all(words.count, words.parity, words.status, words.prefix, node, before, seen, beta, own_g);
  bool is_bad = thread < count && has_more_bits(p.rows, request, thread);
  set_path(request, p.pending, p.rows, slot, words);
  const PendingPath& path = request.path;
  if (thread < tree.padded) {
    tree.seen[thread] = seen;
    tree.beta[thread] = beta;
    tree.own_g[thread] = own_g;
  }
  if (thread < path.count) {
    is_bad |= is_bad_entry(p.pending, node, before);
    tree.path[thread] = clamp_to(node, 0, static_cast<int>(p.pending.record_nodes) - 1);
  }
  __syncthreads();  // the path and what nodes see
  if (path.slot >= 0 && path.bits == 0) {
    if (path.count > 0) copy_records(p, place, path, 0, tree);
    if (thread < count) is_bad |= is_bad_word(seen, thread, [&](int i) { return tree.seen[i]; });
  }
  commit_copies();
  if (count > 1)
    wait_for_copies<2>();  // not for the state and the records
  else
    wait_for_copies<0>();
  is_bad = __syncthreads_or(is_bad);  // the rows are loaded
  const int32_t bits = path.bits | (is_bad ? kBadTree : 0);
  if (path.slot < 0 || bits) {
    if (bits && place.h == 0 && place.begins_head() && thread == 0) set_status(p.pending.status, path.slot, bits);
    wait_for_copies<0>();
    return zero_rows<T>(p, place, request);
  }
  if (count == 0) return;
  if (count > 1) {
    compute_factors(p, count, tree);
    bool divides = true;
    if constexpr (kByChannel) divides = sum_decays(tree, count);
    divides = __syncthreads_and(divides);  // factors and sums
    store_records(p, place, path, count, tree);
    if constexpr (kByChannel) {
      if (!divides) multiply_pairs_of_strong_decays(tree, count);
      __syncthreads();  // the sums are stored
      exponentiate_decays(tree, count);
      __syncthreads();
    }
    if (divides) multiply_pairs(place, tree);
    wait_for_copies<0>();
    __syncthreads();  // pairs, the state, and records of the pending path
    if constexpr (kDelta) {
      if (p.delta_rule) {
        invert_systems(tree);
        __syncthreads();
      }
    }
  }

  if (request.is_fresh)
    state.clear();
  else if constexpr (tree.kStaged)
    state.load(tree.state, tree.kStateRow, place);
  else if (count > 1)
    state.template move<false>(p.layer, place, slot, p.aligned_state, tree.scratch());
  __syncwarp();  // before the scratch is used
  fold_path(p, place, path, tree, state);
  if (path.count > 0 || request.is_fresh)
    state.template move<true>(p.layer, place, slot, p.aligned_state, tree.scratch());
  if (count == 1) return compute_row(p, place, request, tree, state);
#pragma unroll 1
  for (int first = 0; first < (kNodes > 0 ? 1 : count); first += kBlock) {
    if constexpr (kNodes == 0) state.hold();
    if (count - first > kTile)
      compute_block<2>(p, place, request, tree, state, first);
    else
      compute_block<1>(p, place, request, tree, state, first);
  }
}

// Call f.template operator()<kChunks>() with the number of chunks of 64 channels that hold a key.
template <class F>
void with_chunks(int64_t key_dim, F&& f) {
#ifndef SPECDEC_COMPILE_CHECK
  if (key_dim <= 64) return f.template operator()<1>();
  if (key_dim > 128) return f.template operator()<4>();
#endif
  f.template operator()<2>();
}

template <class T, int kChunks, bool kByChannel, bool kDelta, int kNodes>
void launch_pass(const TreeRecurrenceParams& p, Stream stream) {
  const char* op = "tree_recurrence";
  const auto kernel = tree_pass_kernel<T, kChunks, kByChannel, kDelta, kNodes>;
  const auto bytes_of = [](int64_t nodes) {
    return SharedTree<T, kChunks, kByChannel, kDelta, kNodes>(nullptr, static_cast<int>(nodes)).bytes;
  };
  const int64_t capacity = std::min(p.pending.record_nodes, p.rows.rows);
  const size_t bytes = bytes_of(capacity), most = current_device(op).shared_bytes_per_block;
  if (bytes > most) {
    if constexpr (kNodes > 0) return launch_pass<T, kChunks, kByChannel, kDelta, 0>(p, stream);
    int64_t fits = capacity;
    while (bytes_of(fits) > most) --fits;
    throw ValueError(std::string(op) + ": num_nodes is " + std::to_string(capacity) + ", expected " +
                     std::to_string(fits) + " or less for key_dim=" + std::to_string(p.layer.key_dim) + " on this GPU");
  }
  if (bytes > 48 * 1024)
    SD_CUDA_CHECK(op,
                  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  const auto slices = static_cast<unsigned>((p.layer.value_dim + kValues - 1) / kValues);
  const unsigned grid = grid_x(op, (p.pending.batch + 1) * p.layer.value_heads * slices);
  launch(op, kernel, {.grid = grid, .threads = kThreads, .shared_bytes = bytes}, stream, p, slices,
         static_cast<unsigned>(p.layer.value_heads / p.layer.key_heads), static_cast<int>(capacity));
}

}  // namespace

void tree_pass(const TreeRecurrenceParams& p, Stream stream) {
  const auto with_nodes = [&]<class T, int kChunks, int kNodes>() {
    if (p.layer.by_channel) return launch_pass<T, kChunks, true, true, kNodes>(p, stream);
    if (p.delta_rule) return launch_pass<T, kChunks, false, true, kNodes>(p, stream);
    launch_pass<T, kChunks, false, false, kNodes>(p, stream);
  };
  with_float_type(p.dtype, [&]<class T>() {
    with_chunks(p.layer.key_dim, [&]<int kChunks>() {
      if (std::min(p.pending.record_nodes, p.rows.rows) <= kBlock)
        with_nodes.template operator()<T, kChunks, kBlock>();
      else
        with_nodes.template operator()<T, kChunks, 0>();
    });
  });
}

}  // namespace specdec::recurrent
