// One token's row against its cached keys, flash-decoding style: for tiles of 16 keys j of one KV head,
//   s_j = scale log2e q . k_j     p_j = 2^(s_j - m)     l += sum p_j     o += sum p_j v_j
// for GROUP query heads at a time, so that K and V are loaded, and widened, once for all of them; m is raised, and l and
// o rescaled, when a score exceeds it by more than RAISE.
#pragma once
#include "paged.h"
#include "vec.h"
#include <algorithm>
#include <cmath>

constexpr int TILE = 16;
constexpr int AHEAD = 2;  // tiles: what comes from memory meanwhile
constexpr float LOG2E = 1.44269504f;

static inline int padded(int size) { return (size + 31) / 32 * 32; }

constexpr float RAISE = 8;  // log2: see flash.h

// Sums that stay in registers: of KEYS keys x GROUP heads for scores, GROUP heads x PARTS vectors for weights times V.
constexpr int SUMS = WIDTH == 8 ? 8 : 16;  // of 16 or 32 registers
template <int GROUP> constexpr int keys_at_once() { return SUMS / (GROUP == 3 ? 4 : GROUP); }
template <int GROUP> constexpr int parts_at_once() { return std::min(4, keys_at_once<GROUP>()); }

// Keys begin .. end of a request for some of its KV heads. All of them if possible: the heads of a block lie side by
// side, so that memory is read in longer stretches.
struct Item { int request, head, last_head, begin, end; };

// Running softmax of one query head. o: padded(head_size) sums of p v in the order of `Dot`, then 16 that add up to l.
struct Partial {
  float max;
  float *o;
};

// K or V of the keys of a tile: key j at base[j] + at; `next`: of the tile that comes AHEAD.
template <typename T> struct Keys {
  const T *const *base, *const *next;
  int64_t at;

  const T *operator[](int j) const { return base[j] + at; }

  // The row of the tile that comes AHEAD into the second-level cache; called between the products, so that the requests
  // that a core can have under way are used all the time. The first-level cache has too few of them: a Zen 4 read half
  // as many bytes a second when the rows were asked for there.
  void ask(int j, int size) const {
    const char *row = (const char *)(next[j] + at);
    for (int i = 0; i < size * (int)sizeof(T); i += 64) __builtin_prefetch(row + i, 0, 2);
  }
};

// Products in float32 over a pool of any type; q is float32.
template <typename T> struct FloatDot {
  using Key = T;
  using Query = float;
  using Part = Vec;
  static constexpr int PART = WIDTH;  // elements

  template <typename X> static Part part(const X *p, int) { return load(p); }
  static Vec multiply(Vec sum, Part a, Part b) { return sum + a * b; }

  // o += p V: elements d .. d + PARTS WIDTH
  template <int GROUP, int PARTS> static void add_parts(Partial *state, const float (*p)[TILE], const Keys<T> &v, int d) {
    Vec sum[GROUP][PARTS];
    for (int g = 0; g < GROUP; g++)
      for (int i = 0; i < PARTS; i++) sum[g][i] = load(state[g].o + d + i * WIDTH);
    for (int j = 0; j < TILE; j++) {
      const T *row = v[j] + d;
      Vec value[PARTS];
      for (int i = 0; i < PARTS; i++) value[i] = load(row + i * WIDTH);
      for (int g = 0; g < GROUP; g++) {
        const Vec weight = splat(p[g][j]);
        for (int i = 0; i < PARTS; i++) sum[g][i] += weight * value[i];
      }
    }
    for (int g = 0; g < GROUP; g++)
      for (int i = 0; i < PARTS; i++) store(state[g].o + d + i * WIDTH, sum[g][i]);
  }

  template <int GROUP> static void add(Partial *state, const float (*p)[TILE], const Keys<T> &v, int size) {
    constexpr int PARTS = parts_at_once<GROUP>();
    int d = 0;
    for (; d + PARTS * WIDTH <= size; d += PARTS * WIDTH) add_parts<GROUP, PARTS>(state, p, v, d);
    for (; d < size; d += WIDTH) add_parts<GROUP, 1>(state, p, v, d);
  }

  static void in_order(float *, int) {}
};

#ifdef __AVX512BF16__
// Products of bfloat16 pairs, summed in float32, 32 elements at a time; the last part of a head may be a half one.
struct Bf16Dot {
  using Key = Bf16;
  using Query = Bf16;
  using Part = __m512bh;
  static constexpr int PART = 32;

  static __m512i row(const Bf16 *p, int left) { return _mm512_maskz_loadu_epi16(left >= 32 ? 0xffffffff : 0xffff, p); }
  static Part part(const Bf16 *p, int left) { return (__m512bh)row(p, left); }
  static Vec multiply(Vec sum, Part a, Part b) { return (Vec)_mm512_dpbf16_ps((__m512)sum, a, b); }

  // Pairs of tokens: unpacking puts elements of the two side by side, 4 of every 8 in `low`, 4 in `high`.
  template <int GROUP> static void add(Partial *state, const float (*p)[TILE], const Keys<Bf16> &v, int size) {
    alignas(64) uint32_t pairs[GROUP][TILE / 2];
    for (int g = 0; g < GROUP; g++)
      _mm256_store_si256((__m256i *)pairs[g], (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(p[g])));
    for (int d = 0; d < size; d += 32) {
      __m512 sum[GROUP][2];
      for (int g = 0; g < GROUP; g++)
        for (int h = 0; h < 2; h++) sum[g][h] = (__m512)load(state[g].o + d + 16 * h);
#pragma GCC unroll 8
      for (int j = 0; j < TILE; j += 2) {
        const __m512i a = row(v[j] + d, size - d), b = row(v[j + 1] + d, size - d);
        const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
        for (int g = 0; g < GROUP; g++) {
          const __m512bh pair = (__m512bh)_mm512_set1_epi32(pairs[g][j / 2]);
          sum[g][0] = _mm512_dpbf16_ps(sum[g][0], pair, low);
          sum[g][1] = _mm512_dpbf16_ps(sum[g][1], pair, high);
        }
      }
      for (int g = 0; g < GROUP; g++)
        for (int h = 0; h < 2; h++) store(state[g].o + d + 16 * h, (Vec)sum[g][h]);
    }
  }

  static void in_order(float *o, int size) {
    for (int d = 0; d < size; d += 32, o += 32) {
      float mixed[32];
      memcpy(mixed, o, sizeof mixed);
      for (int i = 0; i < 32; i++) o[i] = mixed[i / 8 * 4 + i % 4 + (i & 4 ? 16 : 0)];
    }
  }
};
#endif

// s [GROUP, TILE] = q K^T
template <class Dot, int GROUP>
static inline void scores(const typename Dot::Query *const *q, const Keys<typename Dot::Key> &k, int size, bool ask,
                          float (*s)[TILE]) {
  constexpr int KEYS = keys_at_once<GROUP>();
  Vec sums[GROUP][TILE];
  for (int first = 0; first < TILE; first += KEYS) {
    const typename Dot::Key *row[KEYS];
    for (int j = 0; j < KEYS; j++) row[j] = k[first + j];
    if (ask)
      for (int j = 0; j < KEYS; j++) k.ask(first + j, size);
    Vec sum[KEYS][GROUP];
    for (int j = 0; j < KEYS; j++)
      for (int g = 0; g < GROUP; g++) sum[j][g] = Vec{};
    for (int d = 0; d < size; d += Dot::PART) {
      typename Dot::Part query[GROUP];
      for (int g = 0; g < GROUP; g++) query[g] = Dot::part(q[g] + d, size - d);
      for (int j = 0; j < KEYS; j++) {
        const typename Dot::Part key = Dot::part(row[j] + d, size - d);
        for (int g = 0; g < GROUP; g++) sum[j][g] = Dot::multiply(sum[j][g], query[g], key);
      }
    }
    for (int j = 0; j < KEYS; j++)
      for (int g = 0; g < GROUP; g++) sums[g][first + j] = sum[j][g];
  }
  for (int g = 0; g < GROUP; g++)
    for (int j = 0; j < TILE; j += WIDTH) store(s[g] + j, sum_each(sums[g] + j));
}

// Scores of `count` <= TILE keys -> weights, in place.
static inline void weigh(Partial &state, float *s, int count, int size, float scale, float cap) {
  Vec x[TILE / WIDTH], top = splat(-INFINITY);
  for (int i = 0; i < TILE / WIDTH; i++) {
    x[i] = load(s + i * WIDTH) * splat(scale);
    if (cap > 0) x[i] = soft_cap(x[i], cap * LOG2E);
    if (count < TILE) x[i] = choose(lanes() + i * WIDTH < count, x[i], splat(-INFINITY));
    top = maximum(top, x[i]);
  }
  float *o = state.o, *total = o + padded(size);
  if (any(top > splat(state.max + RAISE))) {
    const float highest = maximum(top);
    const Vec shrink = splat(std::exp2(state.max - highest));
    state.max = highest;
    for (int d = 0; d < padded(size) + 16; d += WIDTH) store(o + d, load(o + d) * shrink);
  }
  Vec sum = load(total);
  for (int i = 0; i < TILE / WIDTH; i++) {
    const Vec p = exp2<5>(x[i] - splat(state.max));
    store(s + i * WIDTH, p);
    sum += p;
  }
  store(total, sum);
}

// GROUP query heads over `count` <= TILE keys; scale includes log2 e. `ask`: for the tile AHEAD.
template <class Dot, int GROUP>
[[gnu::noinline]] static void attend_tile(Partial *state, const typename Dot::Query *const *q,
                                          const Keys<typename Dot::Key> &k, const Keys<typename Dot::Key> &v, int count,
                                          int size, float scale, float cap, bool ask) {
  alignas(64) float p[GROUP][TILE];
  scores<Dot, GROUP>(q, k, size, ask, p);
  for (int g = 0; g < GROUP; g++) weigh(state[g], p[g], count, size, scale, cap);
  if (ask)
    for (int j = 0; j < TILE; j++) v.ask(j, size);
  Dot::template add<GROUP>(state, p, v, size);
}
