// flash.h with float32 products by broadcast and multiply-add, over a pool of any type; T is float for codes.
#pragma once
#include "codes.h"
#include "flash.h"

template <typename T> struct FloatPath {
  static constexpr int DEGREE = 5, GRAIN = ROWS;
  int size;
  float *s;            // [2, STEP, COLUMNS]
  float *p;            // [KEYS, COLUMNS]
  float *k, *v;        // [KEYS, size]
  float *q;            // [tiles, size, COLUMNS]
  const Attend *a;
  PrefillItem item;

  static size_t scratch(int size, int tiles) { return (2 * STEP + KEYS) * COLUMNS + 2 * KEYS * size + tiles * size * COLUMNS; }

  FloatPath(float *memory, int size) : size(size), s(memory) {
    p = s + 2 * STEP * COLUMNS;
    k = p + KEYS * COLUMNS;
    v = k + KEYS * size;
    q = v + KEYS * size;
  }

  void begin(const Attend &attend, const PrefillItem &of, int tiles) {
    a = &attend;
    item = of;
    const int group = a->group(), row0 = a->cu_q[item.request], count = item.end - item.begin;
    Column column(item.begin, group);
    for (int i = 0; i < tiles * COLUMNS; i += WIDTH) {
      int64_t at[WIDTH];
      for (int lane = 0; lane < WIDTH; lane++) {
        at[lane] = (row0 + column.row) * a->q_row + (item.head * group + column.head) * a->q_head;
        if (i + lane + 1 < count) column.advance();
      }
      for (int d = 0; d < size; d += WIDTH) {
        IntVec block[WIDTH];
        for (int lane = 0; lane < WIDTH; lane++) block[lane] = (IntVec)load_as(a->dtype, a->q, at[lane] + d);
        transpose(block);
        for (int lane = 0; lane < WIDTH; lane++)
          store(q + ((int64_t)i / COLUMNS * size + d + lane) * COLUMNS + i % COLUMNS, (Vec)block[lane]);
      }
    }
  }

  // Slots without a token are not read; what pads the last step is zero.
  void load_keys(int key, int count) {
    const int padded = (count + STEP - 1) / STEP * STEP;
    for (int kind = 0; kind < 2; kind++) {
      float *to = kind ? v : k;
      if (a->kv.quantized()) widen_tokens(*a, item.request, item.head, kind, key, count, size, to);
      else copy_tokens(kind, key, count, to);
      std::fill(to + count * size, to + padded * size, 0.f);
    }
  }

  void copy_tokens(int kind, int key, int count, float *to) {
    typename Tokens<T>::Cursor cursor(Tokens<T>(*a, item.request, item.head, kind), key);
    for (int j = 0; j < count; j++, to += size) {
      for (int d = 0; d < size; d += WIDTH) store(to + d, load(cursor.at + d));
      cursor.advance(j + 1 < count);
    }
  }

  // c [ROWS, COLUMNS] += sum over i of left(r, i) right[i, :], left at left + r row + i step
  static void product(float *c, const float *left, int row, int step, const float *right, int depth, bool add) {
    Vec sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
      for (int h = 0; h < VECTORS; h++) sum[r][h] = add ? load(c + r * COLUMNS + WIDTH * h) : Vec{};
    for (int i = 0; i < depth; i++) {
      Vec part[VECTORS];
      for (int h = 0; h < VECTORS; h++) part[h] = load(right + i * COLUMNS + WIDTH * h);
      for (int r = 0; r < ROWS; r++) {
        const Vec factor = splat(left[r * row + i * step]);
        for (int h = 0; h < VECTORS; h++) sum[r][h] += factor * part[h];
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int h = 0; h < VECTORS; h++) store(c + r * COLUMNS + WIDTH * h, sum[r][h]);
  }

  float *scored(int step) const { return s + step % 2 * STEP * COLUMNS; }

  // Half of the products of one STEP.
  void scores(const Scores &of, int half) {
    const int end = std::min((half + 1) * STEP / 2, of.keys<FloatPath>());
    for (int j = half * STEP / 2; j < end; j += ROWS)
      product(scored(of.step) + j * COLUMNS, k + (of.step * STEP + j) * size, size, 1,
              q + (int64_t)of.tile * size * COLUMNS, size, false);
  }

  void put(int j, int h, Vec even, Vec odd) {
    store(p + j * COLUMNS + h, even);
    store(p + (j + 1) * COLUMNS + h, odd);
  }

  // The weights of the keys first .. last.
  void accumulate(float *o, int first, int last) {
    for (int d = 0; d < size; d += ROWS)
      product(o + d * COLUMNS, v + first * size + d, 1, size, p + first * COLUMNS, last - first, true);
  }
};
