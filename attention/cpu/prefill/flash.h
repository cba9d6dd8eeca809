// Attention of many rows over the paged pool; queries are lanes, so nothing is reduced across lanes.
//
//   S^T [keys, columns] = K Q^T       p = 2^(scale log2e S^T - m)       O^T [head_size, columns] += V^T P^T
//
// A column is one query head of one row; the query heads of a KV head stand side by side (column = row * group + head),
// so K and V are read once for all of them. K keeps the pool's own layout. Maximum and sum of a column are plain vector
// operations. The maximum is raised, and O rescaled, only when a score exceeds it by more than RAISE: weights up to
// 2^RAISE cost no precision in floating point, and after the first keys this almost never happens.
//
// Scores are computed STEP keys ahead: their products, on tiles, overlap the exponentials of the STEP before.
#pragma once
#include "paged.h"
#include "vectors/vec.h"
#include <algorithm>
#include <cmath>

constexpr int KEYS = 64;     // keys per pass: K, V^T, P^T and two STEPs of S^T stay in the first-level cache
constexpr int STEP = 32;     // keys whose scores are computed together; passes are multiples of this

// The micro-kernel of products in float32: ROWS x VECTORS sums, VECTORS operands and a broadcast one stay in registers.
// Enough sums to hide the latency of multiply-adds (two a cycle, four cycles each), and ROWS divides STEP and 16.
#if defined(__AVX512F__)
constexpr int ROWS = 8, VECTORS = 2;  // 19 of 32 registers; VECTORS is what AMX tiles want, too
#elif defined(__AVX2__)
constexpr int ROWS = 4, VECTORS = 3;  // 16 of 16
#else
constexpr int ROWS = 8, VECTORS = 3;  // 28 of 32
#endif
constexpr int COLUMNS = VECTORS * WIDTH;  // columns per pass

constexpr float RAISE = 8;    // log2
constexpr float LOG2E = 1.44269504f, LOWEST = -1e30f;

struct PrefillItem { int request, head, begin, end; };  // columns begin .. end of one request and KV head

// The row and the query head of a column, from one column to the next without a division.
struct Column {
  const int group;
  int row, head;

  Column(int column, int group) : group(group), row(column / group), head(column % group) {}

  void advance() {
    if (++head == group) head = 0, row++;
  }
};

// The memory that one thread needs for an item of up to `tiles` x COLUMNS columns; a Path adds its own.
struct Columns {
  float *o;         // [tiles, head_size, COLUMNS]
  float *max, *total;  // [tiles, COLUMNS]
  int32_t *position;   // [tiles, COLUMNS]: of the row in its request
};

// Hides keys first_key + j that column c must not see, and those from `count` on.
static inline void hide(float *s, const int32_t *position, int first_key, int count, int window) {
  const int first = window ? 0 : std::max(0, position[0] + 1 - first_key);  // every column sees the keys before it
  for (int h = 0; h < COLUMNS; h += WIDTH) {
    IntVec last;
    memcpy(&last, position + h, sizeof last);
    for (int j = first; j < STEP; j++) {
      const int key = first_key + j;
      IntVec seen = last >= key;
      if (window) seen &= last - window < key;
      float *at = s + j * COLUMNS + h;
      store(at, j < count ? choose(seen, load(at), splat(-INFINITY)) : splat(-INFINITY));
    }
  }
}

// Raises the running maximum of WIDTH columns if any of STEP scores asks for it. Whether it did; `shrink` = 2^(old - new).
static inline bool raise(const float *s, float scale, float *max, Vec *shrink) {
  Vec a = load(s), b = load(s + COLUMNS), c = load(s + 2 * COLUMNS), d = load(s + 3 * COLUMNS);
#pragma GCC unroll 7
  for (int j = 4; j < STEP; j += 4) {
    a = maximum(a, load(s + j * COLUMNS));
    b = maximum(b, load(s + (j + 1) * COLUMNS));
    c = maximum(c, load(s + (j + 2) * COLUMNS));
    d = maximum(d, load(s + (j + 3) * COLUMNS));
  }
  const Vec top = maximum(maximum(a, b), maximum(c, d)) * splat(scale), old = load(max);
  if (!any(top > old + RAISE)) return false;
  const Vec raised = maximum(top, old);
  *shrink = exp2<5>(old - raised);
  store(max, raised);
  return true;
}

// Scores of a tile of columns over the STEP keys in `step` of a pass that begins at `key`.
struct Scores {
  int tile, step, key, seen;  // seen: of the pass, how many keys any column of the tile sees

  int steps() const { return (seen + STEP - 1) / STEP; }
  // The step's keys that are computed; a path leaves out whole GRAINs of those that no column sees.
  template <class Path> int keys() const {
    return std::min(STEP, (seen - step * STEP + Path::GRAIN - 1) / Path::GRAIN * Path::GRAIN);
  }
};

// The work before the softmax: soft cap, hidden keys, a raised maximum. Weights of this pass from key `first` on are
// not in O yet; if the maximum is raised, they are added first. Returns the first key whose weight is then not in O.
template <class Path>
static int prepare(const Attend &a, Path &path, const Columns &c, const Scores &now, float scale, int first) {
  const int32_t *position = c.position + now.tile * COLUMNS;
  const int low = position[0], high = position[COLUMNS - 1], key = now.key + now.step * STEP;
  const int count = std::min(STEP, now.seen - now.step * STEP);
  float *s = path.scored(now.step), *o = c.o + (int64_t)now.tile * path.size * COLUMNS;
  if (a.soft_cap > 0)
    for (int i = 0; i < count * COLUMNS; i += WIDTH)
      store(s + i, soft_cap(load(s + i) * splat(a.scale), a.soft_cap) * splat(LOG2E));
  if (key + STEP - 1 > low || (a.window && key <= high - a.window)) hide(s, position, key, count, a.window);
  for (int h = 0; h < COLUMNS; h += WIDTH) {
    float *max = c.max + now.tile * COLUMNS + h, *total = c.total + now.tile * COLUMNS + h;
    Vec shrink;
    const IntVec seen = load(max) > splat(LOWEST);
    if (!raise(s + h, scale, max, &shrink) || !any(seen)) continue;  // O and total of unseen columns are zero
    if (first < now.step * STEP) path.accumulate(o, first, now.step * STEP);
    first = now.step * STEP;
    store(total, load(total) * shrink);
    for (int d = 0; d < path.size; d++) store(o + d * COLUMNS + h, load(o + d * COLUMNS + h) * shrink);
  }
  return first;
}

// S^T -> P^T by Path::put for WIDTH columns.
template <class Path>
static inline void softmax(Path &path, const Columns &c, const Scores &now, int h, float scale) {
  float *total = c.total + now.tile * COLUMNS + h;
  const Vec m = load(c.max + now.tile * COLUMNS + h), factor = splat(scale);
  const float *s = path.scored(now.step) + h;
  Vec even = Vec{}, odd = Vec{};
  for (int j = 0, keys = now.keys<Path>(); j < keys; j += 2, s += 2 * COLUMNS) {
    const Vec p = exp2<Path::DEGREE>(load(s) * factor - m), q = exp2<Path::DEGREE>(load(s + COLUMNS) * factor - m);
    even += p;
    odd += q;
    path.put(now.step * STEP + j, h, p, q);
  }
  store(total, load(total) + even + odd);
}

// One pass: the keys key .. key + KEYS, loaded already, for all tiles that see any of them.
template <class Path> static void attend_keys(const Attend &a, Path &path, const Columns &c, int tiles, int key) {
  const float scale = a.soft_cap > 0 ? 1 : a.scale * LOG2E;
  for (int tile = 0; tile < tiles; tile++) {
    const int32_t *position = c.position + tile * COLUMNS;
    Scores now{tile, 0, key, std::min(KEYS, position[COLUMNS - 1] + 1 - key)};
    if (now.seen <= 0 || (a.window && key + now.seen <= position[0] - a.window + 1)) continue;
    for (int half = 0; half < 2; half++) path.scores(now, half);
    int first = 0, last = 0;
    for (; now.step < now.steps(); now.step++) {
      first = prepare(a, path, c, now, scale, first);
      last = now.step * STEP + now.keys<Path>();
      const Scores next{tile, now.step + 1, key, now.seen};
      for (int half = 0; half < 2; half++) {
        if (next.step < next.steps()) path.scores(next, half);
        for (int h = half * VECTORS / 2; h < (half + 1) * VECTORS / 2; h++) softmax(path, c, now, WIDTH * h, scale);
      }
    }
    path.accumulate(c.o + (int64_t)tile * path.size * COLUMNS, first, last);
  }
}

// O^T / total, transposed back, into the item's rows.
static inline void write_rows(const Attend &a, const PrefillItem &item, const Columns &c) {
  const int group = a.group(), size = a.kv.head_size, count = item.end - item.begin;
  Column column(item.begin, group);
  for (int first = 0; first < count; first += WIDTH) {
    const float *o = c.o + (int64_t)first / COLUMNS * size * COLUMNS + first % COLUMNS;
    const int used = std::min(WIDTH, count - first);
    int64_t at[WIDTH];
    for (int i = 0; i < used; i++, column.advance()) {
      const int head = item.head * group + column.head;
      at[i] = a.out_at(a.cu_q[item.request] + column.row, head);
      c.total[first + i] = a.with_sink(c.total[first + i], c.max[first + i], head);
    }
    const Vec inverse = 1 / load(c.total + first);
    for (int d = 0; d < size; d += WIDTH) {
      IntVec block[WIDTH];
      for (int i = 0; i < WIDTH; i++) block[i] = (IntVec)(load(o + (d + i) * COLUMNS) * inverse);
      transpose(block);
      for (int i = 0; i < used; i++) store_as(a.dtype, a.out, at[i] + d, (Vec)block[i]);
    }
  }
}

template <class Path> void attend_item(const Attend &a, const PrefillItem &item, Path &path, const Columns &c) {
  const int count = item.end - item.begin, tiles = (count + COLUMNS - 1) / COLUMNS;
  const int rows = a.cu_q[item.request + 1] - a.cu_q[item.request];
  const int first_position = a.ctx_lens[item.request] - rows;
  std::fill_n(c.o, (int64_t)tiles * a.kv.head_size * COLUMNS, 0.f);
  std::fill_n(c.max, tiles * COLUMNS, LOWEST);
  std::fill_n(c.total, tiles * COLUMNS, 0.f);
  Column column(item.begin, a.group());
  for (int i = 0; i < tiles * COLUMNS; i++) {
    c.position[i] = first_position + column.row;
    if (i + 1 < count) column.advance();  // columns that pad the last tile repeat the last one
  }
  path.begin(a, item, tiles);

  // From a multiple of 16 on, unless that lies in an earlier block: one that no row sees may be another request's.
  const int grain = a.kv.block_size % 16 ? 1 : 16;
  const int begin = a.window ? std::max(0, c.position[0] - a.window + 1) / grain * grain : 0;
  const int end = c.position[count - 1] + 1;
  for (int key = begin; key < end; key += KEYS) {
    path.load_keys(key, std::min(KEYS, end - key));
    attend_keys(a, path, c, tiles, key);
  }
  write_rows(a, item, c);
}
