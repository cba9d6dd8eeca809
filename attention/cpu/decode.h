// One token's row against its cached keys, flash-decoding style: for tiles of 16 keys j of one KV head,
//   s_j = scale q . k_j     m' = max(m, s_j)     p_j = 2^(s_j - m')     l = l 2^(m - m') + sum p_j
//   o = o 2^(m - m') + sum p_j v_j               (s and m in units of log2 e), for GROUP query heads at a time.
#pragma once
#include "paged.h"
#include "vec.h"
#include <cmath>

constexpr int TILE = 16;
constexpr float LOG2E = 1.44269504f;

static inline int padded(int size) { return (size + 31) / 32 * 32; }

// Running softmax of one query head; o is unnormalised and in the order of `Dot`.
struct Partial { float max, total; float *o; };

// Sums of the lanes of a[0] .. a[15], one per lane.
static inline Vec sum_each(Vec a[16]) {
  IntVec lanes[16];
  for (int i = 0; i < 16; i++) lanes[i] = (IntVec)a[i];
  transpose(lanes);
  for (int i = 0; i < 16; i++) a[i] = (Vec)lanes[i];
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; i++) a[i] += a[i + step];
  return a[0];
}

// Products in float32 over a pool of any type; q is float32.
template <typename T> struct FloatDot {
  using Key = T;
  using Query = float;

  static Vec scores(const float *q, const T *const *k, int size) {
    Vec s[TILE] = {};
    for (int d = 0; d < size; d += 16) {
      const Vec part = load(q + d);
      for (int j = 0; j < TILE; j++) s[j] += part * load(k[j] + d);
    }
    return sum_each(s);
  }

  template <int GROUP> static void add(Partial *state, const Vec *p, const T *const *v, int size) {
    for (int d = 0; d < size; d += 16) {
      Vec acc[GROUP];
      for (int g = 0; g < GROUP; g++) acc[g] = load(state[g].o + d);
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

  static Vec scores(const Bf16 *q, const Bf16 *const *k, int size) {
    Vec s[TILE] = {};
    for (int d = 0; d < size; d += 32) {
      const __mmask32 mask = lanes(size - d);
      const __m512bh query = (__m512bh)part(mask, q + d);
      for (int j = 0; j < TILE; j++) s[j] = (Vec)_mm512_dpbf16_ps((__m512)s[j], query, (__m512bh)part(mask, k[j] + d));
    }
    return sum_each(s);
  }

  // Pairs of tokens: unpacking puts elements of the two side by side, 4 of every 8 in `low`, 4 in `high`.
  template <int GROUP> static void add(Partial *state, const Vec *p, const Bf16 *const *v, int size) {
    alignas(64) uint32_t pairs[GROUP][TILE / 2];
    for (int g = 0; g < GROUP; g++)
      _mm256_store_si256((__m256i *)pairs[g], (__m256i)_mm512_cvtneps_pbh((__m512)p[g]));
    for (int d = 0; d < size; d += 32) {
      const __mmask32 mask = lanes(size - d);
      __m512 acc[GROUP][2];
      for (int g = 0; g < GROUP; g++)
        for (int h = 0; h < 2; h++) acc[g][h] = (__m512)load(state[g].o + d + 16 * h);
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
                                               const typename Dot::Key *const *v, int count, int size, float scale, float cap) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vec p[GROUP];
#pragma GCC unroll 1
  for (int g = 0; g < GROUP; g++) {
    Vec s = Dot::scores(q[g], k, size) * splat(scale);
    if (cap > 0) s = soft_cap(s, cap * LOG2E);
    s = choose(lane < count, s, splat(-INFINITY));
    float top = maximum(s);
    if (top > state[g].max) {
      Vec shrink = splat(std::exp2(state[g].max - top));
      state[g].max = top;
      state[g].total *= shrink[0];
      for (int d = 0; d < padded(size); d += 16) store(state[g].o + d, load(state[g].o + d) * shrink);
    }
    p[g] = exp2<5>(s - splat(state[g].max));
    state[g].total += sum(p[g]);
  }
  Dot::template add<GROUP>(state, p, v, size);
}
