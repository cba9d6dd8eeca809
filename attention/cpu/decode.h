// One token's row against its cached keys, flash-decoding style: for tiles of 16 keys j of one KV head,
//   s_j = scale log2e q . k_j     p_j = 2^(s_j - m)     l += sum p_j     o += sum p_j v_j
// for GROUP query heads at a time; m is raised, and l and o rescaled, when a score exceeds it by more than RAISE.
#pragma once
#include "paged.h"
#include "vec.h"
#include <cmath>

constexpr int TILE = 16;
constexpr float LOG2E = 1.44269504f;

static inline int padded(int size) { return (size + 31) / 32 * 32; }

constexpr float RAISE = 8;  // log2: see flash.h

// Keys begin .. end of a request for some of its KV heads. All of them if possible: the heads of a block lie side by
// side, so that memory is read in longer stretches.
struct Item { int request, head, last_head, begin, end; };

// Running softmax of one query head. o: padded(head_size) sums of p v in the order of `Dot`, then 16 that add up to l.
struct Partial {
  float max;
  float *o;
};

// Lanes l with bit DISTANCE clear: a[l] + a[l + DISTANCE]; set: b[l - DISTANCE] + b[l].
template <int DISTANCE> static inline Vec fold(Vec a, Vec b) {
  Corners<DISTANCE> corners;
  return __builtin_shuffle(a, b, corners.upper) + __builtin_shuffle(a, b, corners.lower);
}

// Sums of the lanes of a[0] .. a[15], one per lane.
static inline Vec sum_each(const Vec *a) {
  Vec b[8], c[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) b[i] = fold<8>(a[i], a[i + 8]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) c[i] = fold<4>(b[i], b[i + 4]);
  return fold<1>(fold<2>(c[0], c[2]), fold<2>(c[1], c[3]));
}

// Element d of the tile that comes next, into the first-level cache. Asked for between the products, so that the few
// requests that a core can have under way are used all the time.
template <typename T> static inline void ask(const T *const *next, int d) {
#pragma GCC unroll 16
  for (int j = 0; j < TILE; j++) _mm_prefetch((const char *)(next[j] + d), _MM_HINT_T0);
}

// Products in float32 over a pool of any type; q is float32.
template <typename T> struct FloatDot {
  using Key = T;
  using Query = float;

  static Vec scores(const float *q, const T *const *k, int size, const T *const *next) {
    Vec s[TILE];
#pragma GCC unroll 16
    for (int j = 0; j < TILE; j++) s[j] = Vec{};
    for (int d = 0; d < size; d += 16) {
      const Vec part = load(q + d);
      if (next) ask(next, d);
#pragma GCC unroll 16
      for (int j = 0; j < TILE; j++) s[j] += part * load(k[j] + d);
    }
    return sum_each(s);
  }

  template <int GROUP> static void add(Partial *state, const Vec *p, const T *const *v, int size, const T *const *next) {
    for (int d = 0; d < size; d += 16) {
      ask(next, d);
      Vec acc[GROUP];
      for (int g = 0; g < GROUP; g++) acc[g] = load(state[g].o + d);
#pragma GCC unroll 4
      for (int j = 0; j < TILE; j++) {
        const Vec value = load(v[j] + d);
        for (int g = 0; g < GROUP; g++) acc[g] += splat(p[g][j]) * value;
      }
      for (int g = 0; g < GROUP; g++) store(state[g].o + d, acc[g]);
    }
  }

  static void in_order(float *, int) {}
};

#ifdef __AVX512BF16__
// Products of bfloat16 pairs, summed in float32, 32 elements at a time; the last part of a head may be a half one.
struct Bf16Dot {
  using Key = Bf16;
  using Query = Bf16;

  static __mmask32 lanes(int left) { return left >= 32 ? 0xffffffff : 0xffff; }
  static __m512i part(__mmask32 mask, const Bf16 *p) { return _mm512_maskz_loadu_epi16(mask, p); }

  static Vec scores(const Bf16 *q, const Bf16 *const *k, int size, const Bf16 *const *next) {
    Vec s[TILE];
#pragma GCC unroll 16
    for (int j = 0; j < TILE; j++) s[j] = Vec{};
    for (int d = 0; d < size; d += 32) {
      const __mmask32 mask = lanes(size - d);
      const __m512bh query = (__m512bh)part(mask, q + d);
      if (next) ask(next, d);
#pragma GCC unroll 16
      for (int j = 0; j < TILE; j++) s[j] = (Vec)_mm512_dpbf16_ps((__m512)s[j], query, (__m512bh)part(mask, k[j] + d));
    }
    return sum_each(s);
  }

  // Pairs of tokens: unpacking puts elements of the two side by side, 4 of every 8 in `low`, 4 in `high`.
  template <int GROUP> static void add(Partial *state, const Vec *p, const Bf16 *const *v, int size, const Bf16 *const *next) {
    alignas(64) uint32_t pairs[GROUP][TILE / 2];
    for (int g = 0; g < GROUP; g++)
      _mm256_store_si256((__m256i *)pairs[g], (__m256i)_mm512_cvtneps_pbh((__m512)p[g]));
    for (int d = 0; d < size; d += 32) {
      const __mmask32 mask = lanes(size - d);
      ask(next, d);
      __m512 acc[GROUP][2];
      for (int g = 0; g < GROUP; g++)
        for (int h = 0; h < 2; h++) acc[g][h] = (__m512)load(state[g].o + d + 16 * h);
#pragma GCC unroll 8
      for (int j = 0; j < TILE / 2; j++) {
        const __m512i a = part(mask, v[2 * j] + d), b = part(mask, v[2 * j + 1] + d);
        const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
        for (int g = 0; g < GROUP; g++) {
          const __m512bh pair = (__m512bh)_mm512_set1_epi32(pairs[g][j]);
          acc[g][0] = _mm512_dpbf16_ps(acc[g][0], pair, low);
          acc[g][1] = _mm512_dpbf16_ps(acc[g][1], pair, high);
        }
      }
      for (int g = 0; g < GROUP; g++)
        for (int h = 0; h < 2; h++) store(state[g].o + d + 16 * h, (Vec)acc[g][h]);
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

// GROUP query heads over `count` <= TILE keys; scale includes log2 e.
template <class Dot, int GROUP>
[[gnu::noinline]] static void attend_tile(Partial *state, const typename Dot::Query *const *q, const typename Dot::Key *const *k,
                                               const typename Dot::Key *const *v, const typename Dot::Key *const *next_k,
                                               const typename Dot::Key *const *next_v, int count, int size,
                                               float scale, float cap) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vec p[GROUP];
#pragma GCC unroll 1
  for (int g = 0; g < GROUP; g++) {
    Vec s = Dot::scores(q[g], k, size, g ? nullptr : next_k) * splat(scale);
    if (cap > 0) s = soft_cap(s, cap * LOG2E);
    s = choose(lane < count, s, splat(-INFINITY));
    float *o = state[g].o;
    if (any(s > splat(state[g].max + RAISE))) {
      const float top = maximum(s);
      const Vec shrink = splat(std::exp2(state[g].max - top));
      state[g].max = top;
      for (int d = 0; d < padded(size) + 16; d += 16) store(o + d, load(o + d) * shrink);
    }
    p[g] = exp2<5>(s - splat(state[g].max));
    store(o + padded(size), load(o + padded(size)) + p[g]);
  }
  Dot::template add<GROUP>(state, p, v, size, next_v);
}
