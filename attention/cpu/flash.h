// Attention of many rows over the paged pool, transposed so that queries are lanes and nothing is reduced across them:
//
//   S^T [keys, columns] = K Q^T       p = 2^(scale log2e S^T - m)       O^T [head_size, columns] += V^T P^T
//
// A column is one query head of one row; the query heads of a KV head stand side by side (column = row * group + head),
// so K and V are read once for all of them. K keeps the pool's own layout. Maximum and sum of a column are plain vector
// operations. The maximum is raised, and O rescaled, only when a score exceeds it by more than RAISE: weights up to
// 2^RAISE cost no precision in floating point, and after the first keys this almost never happens.
#pragma once
#include "paged.h"
#include "vec.h"
#include <algorithm>
#include <cmath>

constexpr int KEYS = 128;     // keys per pass: S^T and P^T of COLUMNS stay in the first-level cache
constexpr int COLUMNS = 32;   // columns per pass, two vectors
constexpr int KEY_STEP = 32;  // keys are computed in multiples of this
constexpr float RAISE = 8;    // log2
constexpr float LOG2E = 1.44269504f, LOWEST = -1e30f;

struct Item { int request, head, begin, end; };  // columns begin .. end of one request and KV head

// What one thread needs for an item of up to `tiles` x COLUMNS columns; a Path adds its own.
struct Columns {
  float *o;         // [tiles, head_size, COLUMNS]
  float *max, *total;  // [tiles, COLUMNS]
  int32_t *position;   // [tiles, COLUMNS]: of the row in its request
};

// Hides keys first_key + j that column c must not see, and those from `count` on.
static inline void hide(float *s, const int32_t *position, int first_key, int count, int padded, int window) {
  for (int h = 0; h < COLUMNS; h += 16) {
    IntVec last;
    memcpy(&last, position + h, 64);
    for (int j = 0; j < padded; j++) {
      const int key = first_key + j;
      IntVec seen = last >= key;
      if (window) seen &= last - window < key;
      float *at = s + j * COLUMNS + h;
      store(at, j < count ? choose(seen, load(at), splat(-INFINITY)) : splat(-INFINITY));
    }
  }
}

// Raises the running maximum of 16 columns if any score asks for it. Returns whether it did; `shrink` = 2^(old - new).
static inline bool raise(const float *s, int count, float scale, float *max, Vec *shrink) {
  Vec a = load(s), b = load(s + COLUMNS), c = load(s + 2 * COLUMNS), d = load(s + 3 * COLUMNS);
  for (int j = 4; j < count; j += 4) {
    a = maximum(a, load(s + j * COLUMNS));
    b = maximum(b, load(s + (j + 1) * COLUMNS));
    c = maximum(c, load(s + (j + 2) * COLUMNS));
    d = maximum(d, load(s + (j + 3) * COLUMNS));
  }
  const Vec top = maximum(maximum(a, b), maximum(c, d)) * splat(scale), old = load(max);
  if (maximum(top - old) <= RAISE) return false;
  const Vec raised = maximum(top, old);
  *shrink = exp2<5>(old - raised);
  store(max, raised);
  return true;
}

// S^T -> P^T by Path::put, for one tile of columns over `count` keys, a multiple of KEY_STEP.
template <class Path> static inline void softmax(Path &path, const Columns &c, int tile, int count, float scale) {
  const int size = path.size;
  for (int h = 0; h < COLUMNS; h += 16) {
    float *max = c.max + tile * COLUMNS + h, *total = c.total + tile * COLUMNS + h;
    Vec shrink;
    if (raise(path.s + h, count, scale, max, &shrink)) {
      store(total, load(total) * shrink);
      float *o = c.o + (int64_t)tile * size * COLUMNS + h;
      for (int d = 0; d < size; d++, o += COLUMNS) store(o, load(o) * shrink);
    }
    const Vec m = load(max), factor = splat(scale);
    Vec even = Vec{}, odd = Vec{};
    for (int j = 0; j < count; j += 2) {
      const float *s = path.s + j * COLUMNS + h;
      const Vec p = exp2<Path::DEGREE>(load(s) * factor - m), q = exp2<Path::DEGREE>(load(s + COLUMNS) * factor - m);
      even += p;
      odd += q;
      path.put(j, h, p, q);
    }
    store(total, load(total) + even + odd);
  }
}

// One pass: the keys key .. key + KEYS, loaded already, for all tiles that see any of them.
template <class Path> static void attend_keys(const Attend &a, Path &path, const Columns &c, int tiles, int key) {
  const float scale = a.soft_cap > 0 ? 1 : a.scale * LOG2E;
  for (int tile = 0; tile < tiles; tile++) {
    const int32_t *position = c.position + tile * COLUMNS;
    const int low = position[0], high = position[COLUMNS - 1];
    const int seen = std::min(KEYS, high + 1 - key), padded = (seen + KEY_STEP - 1) / KEY_STEP * KEY_STEP;
    if (seen <= 0 || (a.window && key + seen <= low - a.window + 1)) continue;
    path.scores(tile, padded);
    if (a.soft_cap > 0)
      for (float *s = path.s; s < path.s + seen * COLUMNS; s += 16)
        store(s, soft_cap(load(s) * splat(a.scale), a.soft_cap) * splat(LOG2E));
    if (key + padded - 1 > low || (a.window && key <= high - a.window))
      hide(path.s, position, key, seen, padded, a.window);
    softmax(path, c, tile, padded, scale);
    path.accumulate(c.o + (int64_t)tile * path.size * COLUMNS, padded);
  }
}

// O^T / total, transposed back, into the item's rows.
static inline void write_rows(const Attend &a, const Item &item, const Columns &c) {
  const int group = a.group(), size = a.kv.head_size, count = item.end - item.begin;
  for (int first = 0; first < count; first += 16) {
    const float *o = c.o + (int64_t)first / COLUMNS * size * COLUMNS + first % COLUMNS;
    const Vec inverse = 1 / load(c.total + first);
    for (int d = 0; d < size; d += 16) {
      IntVec block[16];
      for (int i = 0; i < 16; i++) block[i] = (IntVec)(load(o + (d + i) * COLUMNS) * inverse);
      transpose(block);
      for (int i = 0; i < std::min(16, count - first); i++) {
        const int column = item.begin + first + i;
        const int64_t at = a.out_at(a.cu_q[item.request] + column / group, item.head * group + column % group);
        store_as(a.dtype, a.out, at + d, (Vec)block[i]);
      }
    }
  }
}

template <class Path> void attend_item(const Attend &a, const Item &item, Path &path, const Columns &c) {
  const int count = item.end - item.begin, tiles = (count + COLUMNS - 1) / COLUMNS;
  const int rows = a.cu_q[item.request + 1] - a.cu_q[item.request];
  const int first_position = a.ctx_lens[item.request] - rows;
  std::fill_n(c.o, (int64_t)tiles * a.kv.head_size * COLUMNS, 0.f);
  std::fill_n(c.max, tiles * COLUMNS, LOWEST);
  std::fill_n(c.total, tiles * COLUMNS, 0.f);
  for (int i = 0; i < tiles * COLUMNS; i++)  // columns that pad the last tile repeat the last row
    c.position[i] = first_position + (item.begin + std::min(i, count - 1)) / a.group();
  path.begin(a, item, tiles);

  const int begin = a.window ? std::max(0, c.position[0] - a.window + 1) / 16 * 16 : 0;
  const int end = c.position[count - 1] + 1;
  for (int key = begin; key < end; key += KEYS) {
    path.load_keys(key, std::min(KEYS, end - key));
    attend_keys(a, path, c, tiles, key);
  }
  write_rows(a, item, c);
}
