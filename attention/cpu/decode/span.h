// Decode over a quantized pool, read in place: decode.h, with the scales of K in the scores, those of V in the weights.
//
// A span of up to 128 keys of all KV heads goes through each of the three stages together: K of all heads, then V. The
// order of the keys does not matter, so a span is read as RUNS runs of consecutive keys in turn, EACH keys at a time.
// Blocks lie anywhere, and the hardware's prefetchers start again at each block: a core of a Zen 4 that only reads got
// 20.4 GB/s of int8 from four blocks at a time, 15.6 from one at a time, and 31 in order. The next span is asked for
// between the products of this one. Decode of bfloat16 was slower in this form.
#pragma once
#include "codes.h"
#include "decode.h"

constexpr int RUNS = 4, EACH = TILE / RUNS;  // keys of a run in a tile
constexpr int TILES = 8, SPAN = TILES * TILE;
constexpr int SPAN_BYTES = 256 << 10;  // of K and V: two spans, this and the next, take half of a second-level cache

// Up to SPAN keys of a request. Run r has the keys EACH r tiles .. EACH (r + 1) tiles, EACH of them in each tile.
template <typename T> struct Span {
  int count, tiles;
  const T *rows[TILES][TILE];  // K of KV head 0
  int32_t scale[TILES][TILE];  // bytes from a row to its scale

  // `most` keys of the item from `key` on. The last key fills the rest of the tiles: its weight is zero there, and slots
  // without a token may hold NaN.
  Span(const Attend &a, const DecodeItem &item, int key, int most) : count(std::min(most, item.end - key)) {
    tiles = (count + TILE - 1) / TILE;
    typename Tokens<T>::Cursor cursor(Tokens<T>(a, item.request, 0, 0), key);
    for (int r = 0, i = 0; r < RUNS; r++)
      for (int j = 0; j < EACH * tiles; j++) {
        rows[j / EACH][EACH * r + j % EACH] = cursor.at;
        scale[j / EACH][EACH * r + j % EACH] = scale_behind(a.kv, cursor.offset);
        if (++i < count) cursor.advance(true);
      }
  }

  // Rows of a tile, of the last one if there are fewer.
  const T *const *of(int tile) const { return rows[std::min(tile, tiles - 1)]; }

  // Which key the lanes from `first` on of a tile hold.
  IntVec keys(int tile, int first) const {
    const IntVec lane = lanes() + first;
    return (lane / EACH * tiles + tile) * EACH + lane % EACH;
  }
};

// Asks for a line of a row into the second-level cache, at the first element d of the line. A Zen 4 read half as many
// bytes a second into the first-level cache.
template <typename T> [[gnu::always_inline]] static inline void ask(const T *row, int d) {
  if (d * sizeof(T) % 64 == 0) __builtin_prefetch(row + d, 0, 2);
}

// Scores of a query head over a span, then weights.
struct alignas(64) SpanWeights {
  float of[TILES][TILE];
};

// Scales of a KV head's codes over a span.
struct Scales {
  SpanWeights k, v;
};

// s [GROUP] of a tile = q K^T
template <class Dot, int GROUP>
[[gnu::noinline]] static void span_scores(const typename Dot::Query *const *q, const Keys<typename Dot::Key> &k,
                                          const Keys<typename Dot::Key> &coming, int size, SpanWeights *s, int tile) {
  // Keys first + j STRIDE, so that the sums of a round fold into one vector of a head before the next one.
  constexpr int KEYS = keys_at_once<GROUP>(), STRIDE = WIDTH / KEYS;
  using Sum = typename Dot::Sum;
  for (int from = 0; from < TILE; from += WIDTH) {
    Sum folded[GROUP][STRIDE];
#pragma GCC unroll 16
    for (int first = 0; first < STRIDE; first++) {
      const typename Dot::Key *row[KEYS], *next[KEYS];
      for (int j = 0; j < KEYS; j++) {
        row[j] = k[from + first + j * STRIDE];
        next[j] = coming[from + first + j * STRIDE];
      }
      Sum sum[GROUP][KEYS];
      for (int g = 0; g < GROUP; g++)
        for (int j = 0; j < KEYS; j++) sum[g][j] = Sum{};
      const auto multiply = [&](int d, int left) __attribute__((always_inline)) {
        typename Dot::Operand query[GROUP];
        for (int g = 0; g < GROUP; g++) query[g] = Dot::query(q[g] + d);
        for (int j = 0; j < KEYS; j++) {
          const typename Dot::Operand key = Dot::key(row[j] + d, left);
          ask(next[j], d);
          for (int g = 0; g < GROUP; g++) sum[g][j] = Dot::multiply(sum[g][j], query[g], key);
        }
      };
      int d = 0;
      for (; d + Dot::PART <= size; d += Dot::PART) multiply(d, Dot::PART);
      if (d < size) multiply(d, size - d);
      for (int g = 0; g < GROUP; g++) folded[g][first] = sum_each<WIDTH / 2, KEYS>(sum[g]);
    }
    for (int g = 0; g < GROUP; g++)
      store(s[g].of[tile] + from, Dot::total(sum_each<STRIDE / 2, STRIDE>(folded[g])));
  }
}

// Scores of a query head -> weights times the scales of V, in place.
template <class Dot>
static inline void weigh_span(Partial &state, SpanWeights &s, const Span<typename Dot::Key> &span, const Scales &scales,
                              int size, float scale, float cap) {
  Vec top = splat(-INFINITY);
  for (int t = 0; t < span.tiles; t++)
    for (int i = 0; i < TILE; i += WIDTH) {
      Vec x = load(s.of[t] + i) * load(scales.k.of[t] + i) * splat(scale);
      if (cap > 0) x = soft_cap(x, cap * LOG2E);
      if (span.count < span.tiles * TILE) x = choose(span.keys(t, i) < span.count, x, splat(-INFINITY));
      store(s.of[t] + i, x);
      top = maximum(top, x);
    }
  float *o = state.o, *total = o + padded(size);
  if (any(top > splat(state.max + RAISE))) {
    const float highest = maximum(top);
    const Vec shrink = splat(std::exp2(state.max - highest));
    state.max = highest;
    for (int d = 0; d < padded(size) + 16; d += WIDTH) store(o + d, load(o + d) * shrink);
  }
  Vec sum = load(total);
  for (int t = 0; t < span.tiles; t++)
    for (int i = 0; i < TILE; i += WIDTH) {
      const Vec p = exp2<Dot::DEGREE>(load(s.of[t] + i) - splat(state.max));
      sum += p;
      store(s.of[t] + i, p * load(scales.v.of[t] + i));
    }
  store(total, sum);
}

// The scales of a KV head's codes, whose K is at `at`.
template <class Dot>
static inline void gather_scales(const Span<typename Dot::Key> &span, int64_t at, int64_t kind, Scales *to) {
  const auto of = [](const void *row, int64_t bytes) { return *(const float *)((const char *)row + bytes); };
  for (int t = 0; t < span.tiles; t++)
    for (int j = 0; j < TILE; j++) {
      to->k.of[t][j] = of(span.rows[t][j], at + span.scale[t][j]) * Dot::UNIT;
      to->v.of[t][j] = of(span.rows[t][j], at + kind + span.scale[t][j]) * Dot::UNIT;
    }
}

// units: of the query heads, factors of their scores. coming: the next span, or `span` again. s [kv_heads group]:
// scratch.
template <class Dot>
static void attend_span(const Heads &h, Partial *state, const typename Dot::Query *const *q, const float *units,
                        const Span<typename Dot::Key> &span, const Span<typename Dot::Key> &coming, SpanWeights *s) {
  using Rows = Keys<typename Dot::Key>;
  // f(GROUP, its first query head, where K or V is) for all KV heads
  const auto for_all = [&](int64_t kind, const auto &f) {
    for (int head = 0; head < h.kv_heads; head++)
      by_fours(h.group, [&](auto group, int first) { f(group, head * h.group + first, h.k + head * h.head + kind); });
  };
  for (int head = 0; head < h.kv_heads; head++)
    for (int t = 0; t < span.tiles; t++)
      for (int j = 0; j < TILE; j += EACH)
        for (int64_t kind : {(int64_t)0, h.kind})
          __builtin_prefetch((const char *)span.rows[t][j] + h.k + head * h.head + kind + span.scale[t][j]);
  for_all(0, [&](auto group, int first, int64_t at) {
    for (int t = 0; t < span.tiles; t++)
      span_scores<Dot, decltype(group)::value>(q + first, Rows{span.rows[t], at}, Rows{coming.of(t), at}, h.size,
                                               s + first, t);
  });
  Scales scales;
  for (int i = 0; i < h.kv_heads * h.group; i++) {
    if (i % h.group == 0) gather_scales<Dot>(span, h.k + i / h.group * h.head, h.kind, &scales);
    weigh_span<Dot>(state[i], s[i], span, scales, h.size, h.scale * units[i], h.cap);
  }
  for_all(h.kind, [&](auto group, int first, int64_t at) {
    Dot::template add<decltype(group)::value>(state + first, s + first, span, coming, at, h.size);
  });
}
