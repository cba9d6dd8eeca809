// decode.h with products of bfloat16 pairs, summed in float32, 32 elements at a time. The last part of a head may be a
// half one.
#pragma once
#include "decode.h"

#ifdef __AVX512BF16__
struct Bf16Dot {
  using Key = Bf16;
  using Query = Bf16;
  using Operand = __m512bh;
  static constexpr int DEGREE = 3, VECTORS = 1, PART = 32;

  static __m512bh query(const Bf16 *p, int, int left) { return (__m512bh)load_pairs(p, left); }
  static __m512bh key(const Bf16 *p, int, int left) { return (__m512bh)load_pairs(p, left); }
  static Vec multiply(Vec sum, __m512bh a, __m512bh b) { return (Vec)_mm512_dpbf16_ps((__m512)sum, a, b); }

  // Pairs of tokens: unpacking puts elements of the two side by side, 4 of every 8 in `low`, 4 in `high`.
  template <int GROUP, int PARTS>
  static void add_parts(Partial *state, const uint32_t (*pairs)[TILE / 2], const Keys<Bf16> &v, Coming<Bf16> &coming,
                        int d, int left) {
    __m512 sum[GROUP][2 * PARTS];
    for (int g = 0; g < GROUP; g++)
      for (int i = 0; i < 2 * PARTS; i++) sum[g][i] = (__m512)load(state[g].o + d + 16 * i);
    for (int j = 0; j < TILE; j += 2)
      for (int i = 0; i < PARTS; i++) {
        const __m512i a = (__m512i)load_pairs(v[j] + d + 32 * i, left);
        const __m512i b = (__m512i)load_pairs(v[j + 1] + d + 32 * i, left);
        coming.ask();
        coming.ask();
        const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
        for (int g = 0; g < GROUP; g++) {
          const __m512bh pair = (__m512bh)_mm512_set1_epi32(pairs[g][j / 2]);
          sum[g][2 * i] = _mm512_dpbf16_ps(sum[g][2 * i], pair, low);
          sum[g][2 * i + 1] = _mm512_dpbf16_ps(sum[g][2 * i + 1], pair, high);
        }
      }
    for (int g = 0; g < GROUP; g++)
      for (int i = 0; i < 2 * PARTS; i++) store(state[g].o + d + 16 * i, (Vec)sum[g][i]);
  }

  template <int GROUP>
  static void add(Partial *state, const Weights *p, const Keys<Bf16> &v, Coming<Bf16> coming, int size) {
    alignas(64) uint32_t pairs[GROUP][TILE / 2];
    for (int g = 0; g < GROUP; g++)
      _mm256_store_si256((__m256i *)pairs[g], (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(p[g].of)));
    int d = 0;
    for (; d + 64 <= size; d += 64) add_parts<GROUP, 2>(state, pairs, v, coming, d, 32);
    for (; d < size; d += 32) add_parts<GROUP, 1>(state, pairs, v, coming, d, size - d);
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
