// decode.h with float32 products, over a pool of any type; q is float32. bfloat16 is taken 2 WIDTH elements at a time,
// the even ones in one vector and the odd ones in another, because each then takes one operation to widen. q and o are
// kept in that order. AVX2 takes WIDTH elements in order: two vectors at once are slower in its 16 registers.
#pragma once
#include "decode.h"
#include <type_traits>

template <typename T> struct FloatDot {
  using Key = T;
  using Query = float;
  using Operand = Vec;
  static constexpr int DEGREE = 5;  // of the exponential
  static constexpr int VECTORS = std::is_same<T, Bf16>::value && !FEW ? 2 : 1;
  static constexpr int PART = VECTORS * WIDTH;  // elements

  static Vec query(const float *q, int i, int) { return load(q + i * WIDTH); }
  static Vec multiply(Vec sum, Vec a, Vec b) { return sum + a * b; }

  // Vector i of the part at p, of which `left` elements exist: at least 16.
  static Vec key(const T *p, int i, int left) {
    if constexpr (VECTORS == 1) {
      return load(p);
    } else {
      const IntVec pairs = load_pairs(p, left);
      return (Vec)(i ? pairs & -65536 : pairs << 16);
    }
  }

  // o += p V: PARTS vectors from element d on
  template <int GROUP, int PARTS>
  static void add_parts(Partial *state, const Weights *p, const Keys<T> &v, Coming<T> &coming, int d, int left) {
    Vec sum[GROUP][PARTS];
    for (int g = 0; g < GROUP; g++)
      for (int i = 0; i < PARTS; i++) sum[g][i] = load(state[g].o + d + i * WIDTH);
    for (int j = 0; j < TILE; j++) {
      const T *row = v[j] + d;
      Vec weight[GROUP];
      for (int g = 0; g < GROUP; g++) weight[g] = splat(p[g].of[j]);
      for (int i = 0; i < PARTS; i++) {
        const Vec value = key(row + i / VECTORS * PART, i % VECTORS, left);
        if (i % VECTORS == 0 && (d + i * WIDTH) % coming.LINE == 0) coming.ask();
        for (int g = 0; g < GROUP; g++) sum[g][i] += weight[g] * value;
      }
    }
    for (int g = 0; g < GROUP; g++)
      for (int i = 0; i < PARTS; i++) store(state[g].o + d + i * WIDTH, sum[g][i]);
  }

  template <int GROUP> static void add(Partial *state, const Weights *p, const Keys<T> &v, Coming<T> coming, int size) {
    constexpr int PARTS = parts_at_once<GROUP>();
    int d = 0;
    constexpr int STEP = PARTS * WIDTH;
    for (; d + STEP <= size; d += STEP) add_parts<GROUP, PARTS>(state, p, v, coming, d, STEP);
    for (; d < size; d += PART) add_parts<GROUP, VECTORS>(state, p, v, coming, d, size - d);
  }

  // x [padded(size)]: elements in order -> even and odd ones of each part, and back
  static void split(float *x, int size) {
    for (int d = 0; VECTORS == 2 && d < size; d += PART) {
      const Vec a = load(x + d), b = load(x + d + WIDTH);
      store(x + d, __builtin_shuffle(a, b, 2 * lanes()));
      store(x + d + WIDTH, __builtin_shuffle(a, b, 2 * lanes() + 1));
    }
  }
  static void in_order(float *x, int size) {
    const IntVec pick = (lanes() >> 1) + (lanes() & 1) * WIDTH;
    for (int d = 0; VECTORS == 2 && d < size; d += PART) {
      const Vec even = load(x + d), odd = load(x + d + WIDTH);
      store(x + d, __builtin_shuffle(even, odd, pick));
      store(x + d + WIDTH, __builtin_shuffle(even, odd, pick + WIDTH / 2));
    }
  }
};
