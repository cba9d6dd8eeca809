// The operations that vec.h needs of an instruction set, in AVX2 with FMA and F16C.
#pragma once
#include <immintrin.h>

static inline Vec maximum(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
static inline bool any(IntVec mask) { return _mm256_movemask_ps((__m256)mask) != 0; }

static inline __m128i half(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
static inline Vec load(const Bf16 *p) { return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half(p)), 16); }
static inline IntVec load_pairs(const Bf16 *p, int) { IntVec v; memcpy(&v, p, sizeof v); return v; }
static inline Vec load(const Fp16 *p) { return (Vec)_mm256_cvtph_ps(half(p)); }

// The low 16 bits of each lane, which the lane must not exceed.
static inline __m128i narrowed(IntVec v) {
  return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
}

static inline void store(Bf16 *p, Vec v) {
  const IntVec bits = (IntVec)v, odd = (bits >> 16) & 1;
  const IntVec rounded = (IntVec)choose(v == v, (Vec)(bits + 0x7fff + odd), (Vec)(bits | 0x400000));
  _mm_storeu_si128((__m128i *)p, narrowed((IntVec)_mm256_srli_epi32((__m256i)rounded, 16)));
}

static inline void store(Fp16 *p, Vec v) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}

static inline __m128i bytes(const uint8_t *p) { return _mm_loadl_epi64((const __m128i *)p); }
static inline Vec load_int8(const uint8_t *p) { return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes(p))); }
static inline Vec load_e4m3(const uint8_t *p) {
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes(p)), 7);  // the sign twice
  return (Vec)_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((int16_t)0xbfff)));
}
static inline void store_bytes(uint8_t *p, IntVec v) {
  const __m128i words = narrowed(v & 0xff);
  _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
}

static inline IntVec load_words(const uint8_t *p, int) { return (IntVec)_mm256_cvtepi8_epi16(half(p)); }
static inline void store_words(int16_t *p, IntVec v) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v, (__m256i)v), 0x08);
  _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(words));
}
static inline IntVec rounded(Vec v) { return (IntVec)_mm256_cvtps_epi32((__m256)v); }
static inline IntVec multiply_words(IntVec sum, IntVec a, IntVec b) {
  return sum + (IntVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
static inline IntVec low_pairs(IntVec a, IntVec b) { return (IntVec)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b); }
static inline IntVec high_pairs(IntVec a, IntVec b) { return (IntVec)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b); }

static inline Vec split(Vec t, Vec *whole) {
  const Vec bounded = maximum(splat(-127), t);  // in this order NaN stays NaN
  *whole = (Vec)_mm256_floor_ps((__m256)bounded);
  return bounded - *whole;
}
static inline Vec raise_to(Vec p, Vec whole, Vec t) {
  const IntVec exponent = (IntVec)_mm256_cvtps_epi32((__m256)whole) << 23;
  return (Vec)(((IntVec)p + exponent) & ~(t < splat(-126)));
}
