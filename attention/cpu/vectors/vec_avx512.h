// The operations that vec.h needs of an instruction set, in AVX-512 (F, BW, DQ, VL).
#pragma once
#include <immintrin.h>

static inline Vec maximum(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
static inline bool any(IntVec mask) { return _mm512_movepi32_mask((__m512i)mask) != 0; }

static inline __m256i half(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline Vec load(const Bf16 *p) { return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half(p)), 16); }
static inline IntVec load_pairs(const Bf16 *p, int left) {
  return (IntVec)(left >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(0xffff, p));
}
static inline Vec load(const Fp16 *p) { return (Vec)_mm512_cvtph_ps(half(p)); }

static inline void store(Bf16 *p, Vec v) {
#ifdef __AVX512BF16__
  _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  const IntVec bits = (IntVec)v, odd = (bits >> 16) & 1;
  const IntVec rounded = (IntVec)choose(v == v, (Vec)(bits + 0x7fff + odd), (Vec)(bits | 0x400000)) >> 16;
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)rounded));
#endif
}

static inline void store(Fp16 *p, Vec v) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}

// Intrinsics: GCC 12 converts vectors of such different widths element by element, and a decode step took 2.6 times as
// long.
static inline __m128i bytes(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }
static inline Vec load_int8(const uint8_t *p) { return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(p))); }
static inline Vec load_e4m3(const uint8_t *p) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes(p)), 7);  // the sign twice
  return (Vec)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((int16_t)0xbfff)));
}
static inline void store_bytes(uint8_t *p, IntVec v) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v)); }

static inline IntVec load_words(const uint8_t *p, int left) {
  return (IntVec)_mm512_cvtepi8_epi16(left >= 32 ? half(p) : _mm256_zextsi128_si256(bytes(p)));
}
static inline void store_words(int16_t *p, IntVec v) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)v));
}
static inline IntVec rounded(Vec v) { return (IntVec)_mm512_cvtps_epi32((__m512)v); }
static inline IntVec multiply_words(IntVec sum, IntVec a, IntVec b) {
#ifdef __AVX512VNNI__
  return (IntVec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
  return sum + (IntVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
}
static inline IntVec low_pairs(IntVec a, IntVec b) { return (IntVec)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
static inline IntVec high_pairs(IntVec a, IntVec b) { return (IntVec)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }

static inline Vec split(Vec t, Vec *) { return (Vec)_mm512_reduce_ps((__m512)t, 0x09); }
static inline Vec raise_to(Vec p, Vec, Vec t) { return (Vec)_mm512_scalef_ps((__m512)p, (__m512)t); }
