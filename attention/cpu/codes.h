// Rows of a quantized pool: codes of one byte, and behind the codes of a head the scales of its tokens.
// attention/codes.py defines them. Decode reads them in place. AMX tiles and prompts read them through a copy in floats.
#pragma once
#include "paged.h"
#include "vectors/vec.h"
#include <algorithm>
#include <cfloat>
#include <cmath>

constexpr float LARGEST_INT8 = 127, LARGEST_FP8 = 448;  // the largest code

struct Int8 { uint8_t bits; };
struct E4m3 { uint8_t bits; };

static inline Vec load(const Int8 *p) { return load_int8(&p->bits); }
static inline Vec load(const E4m3 *p) { return load_e4m3(&p->bits); }  // 2^-8 of the values

// Bytes from a row of codes, the `offset`th of its block, to its scale.
static inline int64_t scale_behind(const Pool &kv, int offset) {
  return (kv.block_size - offset) * (int64_t)kv.head_size + offset * (int64_t)sizeof(float);
}

// The scale of the row of codes at `row`, the `offset`th of its block.
static inline float *scale_of(const Pool &kv, const uint8_t *row, int offset) {
  return (float *)(row + scale_behind(kv, offset));
}

template <typename To> static inline void widen(const Pool &kv, const uint8_t *row, float scale, To *to) {
  if (kv.dtype == FP8) {
    for (int d = 0; d < kv.head_size; d += WIDTH) store(to + d, load_e4m3(row + d) * splat(256 * scale));
  } else {
    for (int d = 0; d < kv.head_size; d += WIDTH) store(to + d, load_int8(row + d) * splat(scale));
  }
}

// K (kind 0) or V (1) of the tokens first .. first + count of one request and head; `stride` elements a row of `to`.
template <typename To>
static void widen_tokens(const Attend &a, int request, int head, int kind, int first, int count, int64_t stride, To *to) {
  Tokens<uint8_t>::Cursor cursor(Tokens<uint8_t>(a, request, head, kind), first);
  for (int j = 0; j < count; j++, to += stride) {
    widen(a.kv, cursor.at, *scale_of(a.kv, cursor.at, cursor.offset), to);
    cursor.advance(j + 1 < count);
  }
}

// |x| <= 127 -> codes: 1.5 * 2^23 is the float32 whose unit is 1, so the addition rounds to nearest even.
static inline void to_int8(Vec x, uint8_t *p) {
  store_bytes(p, (IntVec)(x + splat(12582912)) - 0x4b400000);
}

// |x| <= 448 -> codes, rounded to nearest even.
static inline void to_e4m3(Vec x, uint8_t *p) {
  const IntVec bits = (IntVec)x & INT32_MAX;
  // 20 of float32's 23 mantissa bits go; 960 = (127 - 7) << 3 moves the exponent's bias from 127 to 7.
  const IntVec normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - 960;
  // Below 2^-6 the codes are multiples of 2^-9: the unit of float32 at 2^14, so one addition rounds.
  const IntVec subnormal = (IntVec)((Vec)bits + splat(16384)) - 0x46800000;
  const IntVec code = (IntVec)choose((Vec)bits < splat(0.015625f), (Vec)subnormal, (Vec)normal) | ((IntVec)x >> 24 & 0x80);
  store_bytes(p, code);
}

// x [head_size] into the row of codes at `row`, the `offset`th of its block. NaN in x makes the scale NaN.
static inline void narrow(const Pool &kv, const float *x, uint8_t *row, int offset) {
  Vec top{};
  IntVec unordered{};
  for (int d = 0; d < kv.head_size; d += WIDTH) {
    const Vec part = load(x + d);
    top = maximum(top, (Vec)((IntVec)part & INT32_MAX));
    unordered |= part != part;
  }
  const float largest = kv.dtype == FP8 ? LARGEST_FP8 : LARGEST_INT8;
  const float scale = std::max(maximum(top) / largest, FLT_MIN);  // never so small that 1 / scale overflows
  const Vec inverse = splat(1 / scale);
  for (int d = 0; d < kv.head_size; d += WIDTH)
    if (kv.dtype == FP8) to_e4m3(load(x + d) * inverse, row + d);
    else to_int8(load(x + d) * inverse, row + d);
  *scale_of(kv, row, offset) = any(unordered) ? NAN : scale;
}
