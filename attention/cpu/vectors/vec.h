// Vectors of WIDTH floats, one register of the CPU's widest kind, in the compiler's own vector types.
//
//   WIDTH  16 AVX-512   8 AVX2   4 NEON
//
// Wider types than a register would read simpler, but g++ keeps them in memory: AVX2 kernels written for 16 floats ran
// at a tenth of their speed. The definitions of each instruction set are in vec_avx512.h, vec_avx2.h and vec_neon.h.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t IntVec __attribute__((vector_size(4 * WIDTH)));

struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };

static inline Vec splat(float x) { return x - Vec{}; }
static inline Vec load(const float *p) { Vec v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, Vec v) { memcpy(p, &v, sizeof v); }
static inline Vec choose(IntVec mask, Vec a, Vec b) { return (Vec)(((IntVec)a & mask) | ((IntVec)b & ~mask)); }

// Each instruction set defines:
static inline Vec maximum(Vec a, Vec b);
static inline bool any(IntVec mask);                      // whether a lane of a comparison is true
static inline Vec load(const Bf16 *p);
static inline Vec load(const Fp16 *p);
static inline IntVec load_pairs(const Bf16 *p, int left); // 2 WIDTH; zeros from `left` on, which is 16 at least
static inline void store(Bf16 *p, Vec v);                 // to nearest, ties to even, as torch rounds; NaN stays NaN
static inline void store(Fp16 *p, Vec v);
static inline Vec load_int8(const uint8_t *p);            // signed bytes
static inline Vec load_e4m3(const uint8_t *p);            // 2^-8 of the values: the exponents of float16 have a bias of
                                                          // 15, those of e4m3 one of 7
static inline void store_bytes(uint8_t *p, IntVec v);     // the low byte of each lane
#if defined(__AVX2__)
static inline IntVec load_words(const uint8_t *p, int left);  // 2 WIDTH signed bytes as int16; `left`: see load_pairs
static inline void store_words(int16_t *p, IntVec v);       // as int16, which the lanes must not exceed
static inline IntVec rounded(Vec v);                        // to nearest
static inline IntVec multiply_words(IntVec sum, IntVec a, IntVec b);  // sum + both products of the int16 of a lane
static inline IntVec low_pairs(IntVec a, IntVec b);         // of every 8 int16 the first 4 of a, each with that of b
static inline IntVec high_pairs(IntVec a, IntVec b);        // the last 4
#endif
static inline Vec split(Vec t, Vec *whole);               // t - floor(t), 0 for -inf; `whole` is for raise_to
static inline Vec raise_to(Vec p, Vec whole, Vec t);      // p 2^floor(t), 0 for t below -126

#if defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#else
#include "vec_neon.h"
#endif

template <int... I> static inline IntVec counted(std::integer_sequence<int, I...>) { return IntVec{I...}; }
static inline IntVec lanes() { return counted(std::make_integer_sequence<int, WIDTH>()); }  // 0, 1, 2, ...

// v with its lanes i and i ^ DISTANCE exchanged
template <int DISTANCE> static inline Vec exchange(Vec v) { return __builtin_shuffle(v, lanes() ^ DISTANCE); }

template <int DISTANCE = WIDTH / 2> static inline float sum(Vec v) {
  if constexpr (DISTANCE == 0) return v[0];
  else return sum<DISTANCE / 2>(v + exchange<DISTANCE>(v));
}

template <int DISTANCE = WIDTH / 2> static inline float maximum(Vec v) {
  if constexpr (DISTANCE == 0) return v[0];
  else return maximum<DISTANCE / 2>(maximum(v, exchange<DISTANCE>(v)));
}

// 2^t for t < 128, 0 below -126 and for -inf. Relative error 1e-4 with DEGREE 3 (bfloat16 resolves 4e-3), 1e-7 with 5.
template <int DEGREE> static inline Vec exp2(Vec t) {
  constexpr float three[] = {0.99992520f, 0.69583356f, 0.22606716f, 0.07802452f};
  constexpr float five[] = {0.99999994f, 0.69315308f, 0.24015361f, 0.05582632f, 0.00898934f, 0.00187758f};
  const float *c = DEGREE == 3 ? three : five;
  Vec whole;
  const Vec fraction = split(t, &whole);
  Vec p = splat(c[DEGREE]);
  for (int i = DEGREE - 1; i >= 0; i--) p = p * fraction + splat(c[i]);
  return raise_to(p, whole, t);
}

// cap tanh(x / cap) = cap (1 - e) / (1 + e) with e = exp(-2 |x| / cap), and the sign of x
static inline Vec soft_cap(Vec x, float cap) {
  IntVec sign = (IntVec)x & INT32_MIN;
  Vec e = exp2<5>((Vec)((IntVec)x ^ sign) * splat(-2.88539008f / cap));
  return (Vec)((IntVec)(splat(cap) * (1 - e) / (1 + e)) | sign);
}

// Lanes of two vectors a and b, b's counted from WIDTH, seen as squares of twice DISTANCE: `upper` is a with its right
// half replaced by b's left one, `lower` is b with its left half replaced by a's right one.
template <int DISTANCE> struct Corners {
  const IntVec right = (lanes() & DISTANCE) != 0;
  const IntVec upper = lanes() + (right & (WIDTH - DISTANCE)), lower = lanes() + (right & WIDTH) + (~right & DISTANCE);
};

template <int DISTANCE> static inline void swap_corners(IntVec *r) {
  const Corners<DISTANCE> corners;
#pragma GCC unroll 16
  for (int i = 0; i < WIDTH; i++) {
    if (i & DISTANCE) continue;
    const IntVec a = r[i], b = r[i + DISTANCE];
    r[i] = __builtin_shuffle(a, b, corners.upper);
    r[i + DISTANCE] = __builtin_shuffle(a, b, corners.lower);
  }
}

// r[i][j] <-> r[j][i]
template <int DISTANCE = WIDTH / 2> static inline void transpose(IntVec *r) {
  swap_corners<DISTANCE>(r);
  if constexpr (DISTANCE > 1) transpose<DISTANCE / 2>(r);
}

// Lanes l with bit DISTANCE clear: a[l] + a[l + DISTANCE]; set: b[l - DISTANCE] + b[l].
template <int DISTANCE, class V> static inline V fold(V a, V b) {
  const Corners<DISTANCE> corners;
  return __builtin_shuffle(a, b, corners.upper) + __builtin_shuffle(a, b, corners.lower);
}

// Sums of the lanes of a[0] .. a[WIDTH - 1], one per lane; a is overwritten. With COUNT < WIDTH,
// each of COUNT vectors is reduced to STRIDE = WIDTH / COUNT lanes; sum_each<STRIDE / 2, STRIDE> over STRIDE such
// results completes the sums.
template <int DISTANCE = WIDTH / 2, int COUNT = WIDTH, class V> static inline V sum_each(V *a) {
  if constexpr (COUNT > 1) {
#pragma GCC unroll 8
    for (int i = 0; i < COUNT / 2; i++) a[i] = fold<DISTANCE>(a[i], a[i + COUNT / 2]);
    return sum_each<DISTANCE / 2, COUNT / 2>(a);
  } else {
    return a[0];
  }
}
