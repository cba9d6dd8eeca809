// Products of codes for span.h: in float32 for both kinds of codes, in 16-bit integers for int8.
//
// The integers are q, and the weights of a span times the scales of V. Both are rounded to 2^-16 of the largest, which
// 16-bit queries do not resolve; products with float32 queries stay in float32. The integer kernels take 2 WIDTH
// elements at a time; the last part of a head may be half as long.
#pragma once
#include "span.h"
#include <type_traits>

template <typename T> struct FloatCodes {
  using Key = T;
  using Query = float;
  using Operand = Vec;
  using Sum = Vec;
  static constexpr int DEGREE = 5, PART = WIDTH;  // of the exponential; elements at a time
  static constexpr float UNIT = std::is_same<T, E4m3>::value ? 256 : 1;  // of what `load` gives

  static Vec query(const float *q) { return load(q); }
  static Vec multiply(Vec sum, Vec a, Vec b) { return sum + a * b; }
  static Vec total(Vec sum) { return sum; }
  static Vec key(const T *p, int) { return load(p); }

  // o += p V: PARTS vectors from element d on, for tiles first .. last
  template <int GROUP, int PARTS>
  static void add_parts(Partial *state, const SpanWeights *p, const Span<T> &span, const Span<T> &coming, int64_t at,
                        int first, int last, int d) {
    Vec sum[GROUP][PARTS];
    for (int g = 0; g < GROUP; g++)
      for (int i = 0; i < PARTS; i++) sum[g][i] = load(state[g].o + d + i * WIDTH);
    for (int t = first; t < last; t++)
      for (int j = 0; j < TILE; j++) {
        const T *row = span.rows[t][j] + at + d, *next = coming.of(t)[j] + at;
        Vec weight[GROUP];
        for (int g = 0; g < GROUP; g++) weight[g] = splat(p[g].of[t][j]);
        for (int i = 0; i < PARTS; i++) {
          ask(next, d + i * WIDTH);
          const Vec value = load(row + i * WIDTH);
          for (int g = 0; g < GROUP; g++) sum[g][i] += weight[g] * value;
        }
      }
    for (int g = 0; g < GROUP; g++)
      for (int i = 0; i < PARTS; i++) store(state[g].o + d + i * WIDTH, sum[g][i]);
  }

  template <int GROUP>
  static void add(Partial *state, const SpanWeights *p, const Span<T> &span, const Span<T> &coming, int64_t at,
                  int size) {
    constexpr int PARTS = parts_at_once<GROUP>(), STEP = PARTS * WIDTH;
    const int tiles = size <= STEP ? span.tiles : 1;  // at a time
    for (int t = 0; t < span.tiles; t += tiles) {
      int d = 0;
      for (; d + STEP <= size; d += STEP) add_parts<GROUP, PARTS>(state, p, span, coming, at, t, t + tiles, d);
      for (; d < size; d += PART) add_parts<GROUP, 1>(state, p, span, coming, at, t, t + tiles, d);
    }
  }

  static float prepare(float *, int) { return 1; }
  static void in_order(float *, int) {}
};

#ifdef __AVX2__
// o in the order of low and high halves of unpacked pairs -> elements in order
static inline void unpack_order(float *o, int size) {
  for (int d = 0; d < size; d += 2 * WIDTH, o += 2 * WIDTH) {
    float mixed[2 * WIDTH];
    memcpy(mixed, o, sizeof mixed);
    for (int i = 0; i < 2 * WIDTH; i++) o[i] = mixed[i / 8 * 4 + i % 4 + (i & 4 ? WIDTH : 0)];
  }
}

struct CodesDot {
  using Key = Int8;
  using Query = int16_t;
  using Operand = IntVec;
  using Sum = IntVec;
  static constexpr int DEGREE = 5, PART = 2 * WIDTH;
  static constexpr float UNIT = 1, LARGEST = 32767;

  static IntVec query(const int16_t *p) { IntVec v; memcpy(&v, p, sizeof v); return v; }
  static IntVec key(const Int8 *p, int left) { return load_words(&p->bits, left); }
  static IntVec multiply(IntVec sum, IntVec a, IntVec b) { return multiply_words(sum, a, b); }
  static Vec total(IntVec sum) { return __builtin_convertvector(sum, Vec); }

  // o += unit p V: 2 PARTS vectors from element d on, for tiles first .. last. See Bf16Dot::add_parts.
  template <int GROUP, int PARTS>
  static void add_parts(Partial *state, const int16_t (*p)[TILES][TILE], const float *unit, const Span<Int8> &span,
                        const Span<Int8> &coming, int64_t at, int first, int last, int d, int left) {
    IntVec sum[GROUP][2 * PARTS];
    for (int g = 0; g < GROUP; g++)
      for (int i = 0; i < 2 * PARTS; i++) sum[g][i] = IntVec{};
    for (int t = first; t < last; t++)
      for (int j = 0; j < TILE; j += 2) {
        const Int8 *row[] = {span.rows[t][j] + at, span.rows[t][j + 1] + at};
        for (int i = 0; i < PARTS; i++) {
          for (int k = 0; k < 2; k++) ask(coming.of(t)[j + k] + at, d + PART * i);
          const IntVec a = load_words(&row[0]->bits + d + PART * i, left);
          const IntVec b = load_words(&row[1]->bits + d + PART * i, left);
          const IntVec low = low_pairs(a, b), high = high_pairs(a, b);
          for (int g = 0; g < GROUP; g++) {
            int32_t both;
            memcpy(&both, p[g][t] + j, sizeof both);
            const IntVec pair = both - IntVec{};
            sum[g][2 * i] = multiply_words(sum[g][2 * i], pair, low);
            sum[g][2 * i + 1] = multiply_words(sum[g][2 * i + 1], pair, high);
          }
        }
      }
    for (int g = 0; g < GROUP; g++)
      for (int i = 0; i < 2 * PARTS; i++) {
        float *o = state[g].o + d + WIDTH * i;
        store(o, load(o) + total(sum[g][i]) * splat(unit[g]));
      }
  }

  template <int GROUP>
  static void add(Partial *state, const SpanWeights *p, const Span<Int8> &span, const Span<Int8> &coming, int64_t at,
                  int size) {
    constexpr int PARTS = FEW ? (GROUP < 3 ? 2 : 1) : 2, STEP = PARTS * PART;
    alignas(64) int16_t words[GROUP][TILES][TILE];
    float unit[GROUP];
    for (int g = 0; g < GROUP; g++) unit[g] = to_words(p[g].of[0], span.tiles * TILE, LARGEST, words[g][0]);
    const int tiles = size <= STEP ? span.tiles : 1;  // at a time
    for (int t = 0; t < span.tiles; t += tiles) {
      int d = 0;
      for (; d + STEP <= size; d += STEP)
        add_parts<GROUP, PARTS>(state, words, unit, span, coming, at, t, t + tiles, d, PART);
      for (; d < size; d += PART) add_parts<GROUP, 1>(state, words, unit, span, coming, at, t, t + tiles, d, size - d);
    }
  }

  // x [count] -> integers up to `largest`; the unit to multiply them by, NaN if one of x is.
  static float to_words(const float *x, int count, float largest, int16_t *to) {
    Vec top{};
    IntVec unordered{};
    for (int i = 0; i < count; i += WIDTH) {
      const Vec part = load(x + i);
      top = maximum(top, (Vec)((IntVec)part & INT32_MAX));
      unordered |= part != part;
    }
    const float unit = std::max(maximum(top) / largest, FLT_MIN);
    for (int i = 0; i < count; i += WIDTH) store_words(to + i, rounded(load(x + i) * splat(1 / unit)));
    return any(unordered) ? NAN : unit;
  }

  // q [padded(size)] -> integers in its place, so large that no sum of products overflows; the factor of its scores
  static float prepare(float *x, int size) {
    return to_words(x, padded(size), std::min(LARGEST, float(INT32_MAX / 128 / size)), (int16_t *)x);
  }
  static void in_order(float *o, int size) { unpack_order(o, size); }
};
#endif
