// One token's row against its cached keys on AMX tiles, K and V straight from the pool, 16 keys a tile.
//
//   S^T [16 keys, heads] = K [16 keys, 32 elements] x Q^T, over the parts of 32 elements; Q^T is packed once per item
//   O [2 heads, 32 elements] += P [2 heads, 16 keys] x V [16 keys, 32 elements]
//
// tdpbf16ps wants pairs of its right operand's rows interleaved, which keys of V are not. So a row of V counts as 16
// pairs of elements, and a head has two rows of P: pairs (p, 0) sum the even elements, pairs (0, p) the odd ones. Half
// of the products are by zero, and still no instruction is spent on rearranging V.
//
// A score's lane is key * HEADS + head, so a few heads fill whole vectors; maximum and sum stay one vector of them.
//
// Codes are widened first, the tiles of a pass and head together, so that their stores have left the core's buffers when
// the tiles read them.
//
// Floor (32 requests x 256 tokens, SmolLM2, one thread): reading the blocks in the same order and nothing else takes 16
// ms for 30 layers, 13 ms from huge pages. Reached: 20 and 17 ms; with dot products 30 ms.
#pragma once
#include "codes.h"
#include "decode.h"
#include <algorithm>
#include <cstdlib>

#ifdef __AMX_BF16__

constexpr int PASS = 4;  // tiles of keys whose weights are computed together, while the next ones come from memory

// r[v] lane l, of HEADS vectors that hold 16 keys x HEADS: becomes r[head] lane key.
template <int HEADS> static inline void by_head(Vec *r) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto stage = [&](auto distance) {
    constexpr int DISTANCE = decltype(distance)::value;
    if constexpr (DISTANCE < HEADS) {
      const Corners<DISTANCE> corners;
#pragma GCC unroll 8
      for (int i = 0; i < HEADS; i++) {
        if (i & DISTANCE) continue;
        const Vec a = r[i], b = r[i + DISTANCE];
        r[i] = __builtin_shuffle(a, b, corners.upper);
        r[i + DISTANCE] = __builtin_shuffle(a, b, corners.lower);
      }
    }
  };
  stage(std::integral_constant<int, 1>());
  stage(std::integral_constant<int, 2>());
  stage(std::integral_constant<int, 4>());
  // now lane (key within vector) * HEADS + vector; a vector held 16 / HEADS keys
  const IntVec order = lane % (16 / HEADS) * HEADS + lane / (16 / HEADS);
#pragma GCC unroll 8
  for (int i = 0; i < HEADS; i++) r[i] = __builtin_shuffle(r[i], order);
}

template <int DISTANCE> static inline Vec maximum_over_keys(Vec v) {
  if constexpr (DISTANCE < 16) return maximum_over_keys<2 * DISTANCE>(maximum(v, exchange<DISTANCE>(v)));
  return v;
}

// HEADS query heads (a power of two; missing ones count as zeros) of head_size 32 PARTS, for one KV head.
template <int HEADS, int PARTS> struct TileHeads {
  uint32_t q[PARTS][16][HEADS];   // pairs of elements
  float o[PARTS][2 * HEADS][16];  // even elements of head h in row 2 h, odd ones in the next
  float max[16], total[16];       // lanes: key * HEADS + head; max is the same for all keys
};

// Works on items of one thread after another. Needs blocks of whole tiles and head_size = 32 PARTS.
template <int HEADS, int PARTS> class TileKernel {
  using State = TileHeads<HEADS, PARTS>;
  static constexpr int SIZE = 32 * PARTS, ROWS = 2 * HEADS;
  // Tiles: 0 .. PARTS - 1 hold O, 4 scores, 5 a part of Q^T, 6 keys of K or V, 7 weights.

 public:
  TileKernel(const Attend &attend, int kv_heads)
      : a(attend), codes(a.kv.quantized()), element(codes ? 1 : 2), passes((a.group() + HEADS - 1) / HEADS) {
    states = (State *)aligned_alloc(64, kv_heads * passes * sizeof(State));
    struct alignas(64) { uint8_t palette = 1, start = 0, pad[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } t;
    for (int i = 0; i < 4; i++) t.bytes[i] = 64, t.rows[i] = ROWS;
    t.bytes[4] = t.bytes[5] = 4 * HEADS;
    t.rows[4] = t.rows[5] = 16;
    t.bytes[6] = 64, t.rows[6] = 16;
    t.bytes[7] = 64, t.rows[7] = ROWS;
    fence(&t);
    _tile_loadconfig(&t);
  }
  ~TileKernel() {
    _tile_release();
    free(states);
  }
  TileKernel(const TileKernel &) = delete;

  // `next`: what this thread will work on afterwards, or null: its first keys are asked for in time.
  void attend(const DecodeItem &item, const DecodeItem *next, Partial *partials) {
    for (int h = item.head; h < item.last_head; h++)
      for (int pass = 0; pass < passes; pass++) begin(item, h, pass, state(item, h, pass));
    const char *tiles[PASS], *after[PASS];
    int count = gather(item, first_key(item), tiles);
    for (int key = first_key(item); key < item.end; key += 16 * PASS) {
      int coming = gather(item, key + 16 * PASS, after);
      if (!coming && next) coming = gather(*next, first_key(*next), after);
      for (int h = item.head; h < item.last_head; h++)
        for (int pass = 0; pass < passes; pass++)
          attend_tiles(item, h, key, tiles, count, after, pass ? 0 : coming, state(item, h, pass));
      std::copy_n(after, PASS, tiles);
      count = coming;
    }
    for (int h = item.head; h < item.last_head; h++)
      for (int pass = 0; pass < passes; pass++) end(item, h, pass, state(item, h, pass), partials);
  }

  static void in_order(float *, int) {}

 private:
  const Attend &a;
  const bool codes;       // the pool is quantized
  const int64_t element;  // bytes of one in the pool
  const int passes;       // over a KV head's query heads
  State *states;
  alignas(64) float s[PASS][HEADS][16];
  alignas(64) uint32_t p[PASS][ROWS][16];
  alignas(64) Bf16 edge[16][SIZE];
  alignas(64) Bf16 wide[16 * PASS][SIZE];  // K or V of a pass and head, of a quantized pool

  // The intrinsics of tiles do not tell the compiler what memory they read.
  static void fence(const void *memory) { asm volatile("" : : "r"(memory) : "memory"); }
  static int first_key(const DecodeItem &item) { return item.begin / 16 * 16; }
  State &state(const DecodeItem &item, int head, int pass) { return states[(head - item.head) * passes + pass]; }

  // Finds K of KV head 0 for up to PASS tiles from `key` on; returns the number of tiles.
  int gather(const DecodeItem &item, int key, const char **to) const {
    const int32_t *table = a.block_tables + item.request * a.table_row;
    int count = 0;
    for (; count < PASS && key < item.end; key += 16) {
      const int64_t at = table[key / a.kv.block_size] * a.kv.block + key % a.kv.block_size * a.kv.token;
      to[count++] = (const char *)a.kv.data + element * at;
    }
    return count;
  }

  // `wide` becomes K or V of `count` tiles; rows outside of the item, whose slots may hold anything, become zeros.
  void widen_tiles(const DecodeItem &item, int head, int kind, int key, int count) {
    const int begin = std::max(0, item.begin - key), end = std::min(16 * count, item.end - key);
    memset(wide[0], 0, begin * sizeof wide[0]);
    widen_tokens(a, item.request, head, kind, key + begin, end - begin, SIZE, wide[begin]);
    memset(wide[0] + end * SIZE, 0, (16 * count - end) * sizeof wide[0]);
    fence(wide);
  }

  void begin(const DecodeItem &item, int head, int pass, State &state) {
    const int first = head * a.group() + pass * HEADS, count = std::min(HEADS, a.group() - pass * HEADS);
    memset(&state, 0, sizeof state);
    for (int h = 0; h < count; h++) {
      const Bf16 *row = (const Bf16 *)a.q + a.cu_q[item.request] * a.q_row + (first + h) * a.q_head;
      for (int i = 0; i < SIZE / 2; i++) memcpy(&state.q[0][0][0] + i * HEADS + h, row + 2 * i, 4);
    }
    store(state.max, splat(-INFINITY));
  }

  void attend_tiles(const DecodeItem &item, int head, int key, const char *const *tiles, int count,
                    const char *const *after,
                    int coming, State &state) {
    const int64_t k_at = element * head * a.kv.head, v_at = k_at + element * a.kv.kind;
    const int64_t row_bytes = codes ? 2 * SIZE : 2 * a.kv.token;
    if (codes) widen_tiles(item, head, 0, key, count);
    fence(&state);
    for (int t = 0; t < count; t++) {
      if (t < coming) ask(after[t] + k_at);
      scores(codes ? wide[16 * t] : (const Bf16 *)(tiles[t] + k_at), row_bytes, state, s[t][0]);
    }
    for (int t = count; t < coming; t++) ask(after[t] + k_at);
    weigh(item, key, count, state);
    if (codes) widen_tiles(item, head, 1, key, count);
    fence(p);
    load_sums(state);
    for (int t = 0; t < count; t++) {
      if (t < coming) ask(after[t] + v_at);
      const int from = key + 16 * t;
      const Bf16 *v = codes ? wide[16 * t] : (const Bf16 *)(tiles[t] + v_at);
      if (!codes && (from < item.begin || from + 16 > item.end))
        add(copy_edge(v, item.begin - from, item.end - from), 2 * SIZE, p[t][0]);
      else
        add(v, row_bytes, p[t][0]);
    }
    for (int t = count; t < coming; t++) ask(after[t] + v_at);
    store_sums(state);
  }

  void ask(const char *tile) const {
    const int bytes = element * SIZE;
#pragma GCC unroll 1
    for (int j = 0; j < 16; j++, tile += element * a.kv.token)
      for (int i = 0; i < bytes; i += 64) _mm_prefetch(tile + i, _MM_HINT_T1);
  }

  void scores(const Bf16 *k, int64_t row_bytes, const State &state, float *to) const {
    _tile_zero(4);
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) {
      _tile_loadd(6, k + 32 * i, row_bytes);
      _tile_loadd(5, state.q[i], 4 * HEADS);
      _tile_dpbf16ps(4, 6, 5);
    }
    _tile_stored(4, to, 4 * HEADS);
  }

  // Scores of `count` tiles -> weights; raises the maximum and shrinks the sums when a score exceeds it by RAISE.
  void weigh(const DecodeItem &item, int key, int count, State &state) {
    const Vec scale = splat(a.scale * LOG2E);
    Vec top = splat(-INFINITY);
    for (int t = 0; t < count; t++) {
      const int from = key + 16 * t;
      const bool whole = from >= item.begin && from + 16 <= item.end;
#pragma GCC unroll 8
      for (int i = 0; i < HEADS; i++) {
        Vec x = load(s[t][i]) * scale;
        if (a.soft_cap > 0) x = soft_cap(x, a.soft_cap * LOG2E);
        if (!whole) x = visible(x, from + i * (16 / HEADS), item);
        store(s[t][i], x);
        top = maximum(top, x);
      }
    }
    Vec max = load(state.max), total = load(state.total);
    if (any(top > max + RAISE)) {
      const Vec raised = maximum(max, maximum_over_keys<HEADS>(top)), shrink = exp2<5>(max - raised);
      total *= shrink;
      for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < PARTS; i++)
          for (int odd = 0; odd < 2; odd++)
            store(state.o[i][2 * h + odd], load(state.o[i][2 * h + odd]) * splat(shrink[h]));
      store(state.max, max = raised);
    }
    for (int t = 0; t < count; t++) {
      Vec weights[HEADS];
#pragma GCC unroll 8
      for (int i = 0; i < HEADS; i++) total += weights[i] = exp2<3>(load(s[t][i]) - max);
      by_head<HEADS>(weights);
#pragma GCC unroll 8
      for (int h = 0; h < HEADS; h++) {
        const __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)weights[h]));
        _mm512_store_si512(p[t][2 * h], even);
        _mm512_store_si512(p[t][2 * h + 1], _mm512_slli_epi32(even, 16));
      }
    }
    store(state.total, total);
  }

  static Vec visible(Vec x, int key, const DecodeItem &item) {
    const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const IntVec keys = key + lane / HEADS;
    return choose((keys >= item.begin) & (keys < item.end), x, splat(-INFINITY));
  }

  // A copy of a tile of V with zeros outside of begin .. end: those rows may hold NaN, and their weight is zero.
  const Bf16 *copy_edge(const Bf16 *v, int begin, int end) {
    memset(edge, 0, sizeof edge);
    for (int j = std::max(0, begin); j < std::min(16, end); j++) memcpy(edge[j], v + j * a.kv.token, sizeof edge[j]);
    fence(edge);
    return edge[0];
  }

  void load_sums(const State &state) const {
    _tile_loadd(0, state.o[0], 64);
    if constexpr (PARTS > 1) _tile_loadd(1, state.o[1], 64);
    if constexpr (PARTS > 2) _tile_loadd(2, state.o[2], 64);
    if constexpr (PARTS > 3) _tile_loadd(3, state.o[3], 64);
  }

  void add(const Bf16 *v, int64_t row_bytes, const uint32_t *weights) const {
    _tile_loadd(7, weights, 64);
    _tile_loadd(6, v, row_bytes);
    _tile_dpbf16ps(0, 7, 6);
    if constexpr (PARTS > 1) {
      _tile_loadd(6, v + 32, row_bytes);
      _tile_dpbf16ps(1, 7, 6);
    }
    if constexpr (PARTS > 2) {
      _tile_loadd(6, v + 64, row_bytes);
      _tile_dpbf16ps(2, 7, 6);
    }
    if constexpr (PARTS > 3) {
      _tile_loadd(6, v + 96, row_bytes);
      _tile_dpbf16ps(3, 7, 6);
    }
  }

  void store_sums(State &state) const {
    _tile_stored(0, state.o[0], 64);
    if constexpr (PARTS > 1) _tile_stored(1, state.o[1], 64);
    if constexpr (PARTS > 2) _tile_stored(2, state.o[2], 64);
    if constexpr (PARTS > 3) _tile_stored(3, state.o[3], 64);
  }

  void end(const DecodeItem &item, int head, int pass, const State &state, Partial *partials) const {
    const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int at = (head - item.head) * a.group() + pass * HEADS;
    for (int h = 0; h < std::min(HEADS, a.group() - pass * HEADS); h++) {
      Partial &partial = partials[at + h];
      partial.max = state.max[h];
      for (int i = 0; i < PARTS; i++) {
        const Vec even = load(state.o[i][2 * h]), odd = load(state.o[i][2 * h + 1]);
        store(partial.o + 32 * i, __builtin_shuffle(even, odd, lane / 2 + lane % 2 * 16));
        store(partial.o + 32 * i + 16, __builtin_shuffle(even, odd, 8 + lane / 2 + lane % 2 * 16));
      }
      for (int j = 0; j < 16; j++) partial.o[SIZE + j] = j % HEADS == h ? state.total[j] : 0;
    }
  }
};

#endif
