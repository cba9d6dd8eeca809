// Vectors of 16 floats in the compiler's own vector types: one AVX-512 register, two of AVX2.
#pragma once
#include "paged.h"
#include <cstring>
#include <immintrin.h>

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef uint16_t HalfVec __attribute__((vector_size(32)));

struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };

static inline Vec splat(float x) { return x - Vec{}; }
static inline Vec load(const float *p) { Vec v; memcpy(&v, p, 64); return v; }
static inline void store(float *p, Vec v) { memcpy(p, &v, 64); }
static inline Vec choose(IntVec mask, Vec a, Vec b) { return (Vec)(((IntVec)a & mask) | ((IntVec)b & ~mask)); }

static inline Vec maximum(Vec a, Vec b) {
#ifdef __AVX512F__
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return choose(a > b, a, b);
#endif
}

// v with its lanes i and i ^ DISTANCE exchanged
template <int DISTANCE> static inline Vec exchange(Vec v) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return __builtin_shuffle(v, lane ^ DISTANCE);
}

static inline float sum(Vec v) {
  v += exchange<8>(v);
  v += exchange<4>(v);
  v += exchange<2>(v);
  return v[0] + v[1];
}

static inline float maximum(Vec v) {
  v = maximum(v, exchange<8>(v));
  v = maximum(v, exchange<4>(v));
  v = maximum(v, exchange<2>(v));
  return v[0] > v[1] ? v[0] : v[1];
}

static inline bool any(IntVec mask) {
#ifdef __AVX512DQ__
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#else
  return maximum((Vec)(mask & 0x3f800000)) > 0;
#endif
}

static inline Vec load(const Bf16 *p) {
  HalfVec half;
  memcpy(&half, p, 32);
  return (Vec)(__builtin_convertvector(half, IntVec) << 16);
}

static inline Vec load(const Fp16 *p) {
#ifdef __AVX512F__
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
  Vec v;
  for (int i = 0; i < 2; i++) {
    __m256 part = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + i));
    memcpy((char *)&v + 32 * i, &part, 32);
  }
  return v;
#endif
}

// To nearest, ties to even, as torch rounds; NaN stays NaN.
static inline void store(Bf16 *p, Vec v) {
#ifdef __AVX512BF16__
  _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  IntVec bits = (IntVec)v, odd = (bits >> 16) & 1;
  IntVec rounded = (IntVec)choose(v == v, (Vec)(bits + 0x7fff + odd), (Vec)(bits | 0x400000));
  HalfVec half = __builtin_convertvector(rounded >> 16, HalfVec);
  memcpy(p, &half, 32);
#endif
}

static inline void store(Fp16 *p, Vec v) {
#ifdef __AVX512F__
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < 2; i++) {
    __m256 part;
    memcpy(&part, (char *)&v + 32 * i, 32);
    _mm_storeu_si128((__m128i *)p + i, _mm256_cvtps_ph(part, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
}

static inline Vec load_as(Dtype dtype, const void *p, int64_t at) {
  return dtype == FLOAT32 ? load((const float *)p + at)
         : dtype == BFLOAT16 ? load((const Bf16 *)p + at) : load((const Fp16 *)p + at);
}

static inline void store_as(Dtype dtype, void *p, int64_t at, Vec v) {
  if (dtype == FLOAT32) store((float *)p + at, v);
  else if (dtype == BFLOAT16) store((Bf16 *)p + at, v);
  else store((Fp16 *)p + at, v);
}

// 2^t for t < 128, 0 below -126 and for -inf. Relative error 1e-4 with DEGREE 3 (bfloat16 resolves 4e-3), 1e-7 with 5.
template <int DEGREE> static inline Vec exp2(Vec t) {
  constexpr float three[] = {0.99992520f, 0.69583356f, 0.22606716f, 0.07802452f};
  constexpr float five[] = {0.99999994f, 0.69315308f, 0.24015361f, 0.05582632f, 0.00898934f, 0.00187758f};
  const float *c = DEGREE == 3 ? three : five;
#ifdef __AVX512DQ__
  Vec fraction = (Vec)_mm512_reduce_ps((__m512)t, 0x09);  // t - floor(t), and 0 for -inf
#else
  Vec bounded = maximum(t, splat(-127));
  IntVec whole = __builtin_convertvector(bounded, IntVec);  // towards zero
  whole += __builtin_convertvector(whole, Vec) > bounded;   // a true comparison is -1: now floor
  Vec fraction = bounded - __builtin_convertvector(whole, Vec);
#endif
  Vec p = splat(c[DEGREE]);
  for (int i = DEGREE - 1; i >= 0; i--) p = p * fraction + splat(c[i]);
#ifdef __AVX512F__
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)t);  // p 2^floor(t)
#else
  return choose(t < splat(-126), Vec{}, (Vec)((IntVec)p + (whole << 23)));
#endif
}

// cap tanh(x / cap) = cap (1 - e) / (1 + e) with e = exp(-2 |x| / cap), and the sign of x
static inline Vec soft_cap(Vec x, float cap) {
  IntVec sign = (IntVec)x & INT32_MIN;
  Vec e = exp2<5>((Vec)((IntVec)x ^ sign) * splat(-2.88539008f / cap));
  return (Vec)((IntVec)(splat(cap) * (1 - e) / (1 + e)) | sign);
}

// Lanes of two vectors a and b, b's counted from 16, seen as squares of twice DISTANCE: `upper` is a with its right half
// replaced by b's left one, `lower` is b with its left half replaced by a's right one.
template <int DISTANCE> struct Corners {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const IntVec right = (lane & DISTANCE) != 0;
  const IntVec upper = lane + (right & (16 - DISTANCE)), lower = lane + (right & 16) + (~right & DISTANCE);
};

template <int DISTANCE> static inline void swap_corners(IntVec *r) {
  const Corners<DISTANCE> corners;
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    if (i & DISTANCE) continue;
    const IntVec a = r[i], b = r[i + DISTANCE];
    r[i] = __builtin_shuffle(a, b, corners.upper);
    r[i + DISTANCE] = __builtin_shuffle(a, b, corners.lower);
  }
}

// r[i][j] <-> r[j][i]
static inline void transpose(IntVec r[16]) {
  swap_corners<8>(r);
  swap_corners<4>(r);
  swap_corners<2>(r);
  swap_corners<1>(r);
}
