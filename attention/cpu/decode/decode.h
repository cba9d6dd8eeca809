// One token's row against its cached keys, flash-decoding style. For tiles of 16 keys j:
//   s_j = scale log2e q . k_j     p_j = 2^(s_j - m)     l += sum p_j     o += sum p_j v_j
// for up to four query heads of a KV head at a time, so that K and V are loaded, and widened, once for all of them; m
// is raised, and l and o rescaled, when a score exceeds it by more than RAISE.
//
// All KV heads of a tile go through each of the three stages together. Memory is then read in rising order, K of all
// heads and then V, and the softmax of one query head overlaps with that of the others.
#pragma once
#include "paged.h"
#include "vectors/vec.h"
#include <algorithm>
#include <cmath>
#include <type_traits>

constexpr int TILE = 16;
constexpr int AHEAD = 2;  // tiles that are fetched from memory during the work on one
constexpr float LOG2E = 1.44269504f;

static inline int padded(int size) { return (size + 31) / 32 * 32; }

constexpr float RAISE = 8;  // log2: see flash.h

// Sums that stay in registers next to their factors: of KEYS keys x GROUP heads for scores, of GROUP heads x PARTS
// vectors for weights times V. AVX2 has 16 registers, the others have 32.
constexpr bool FEW = WIDTH == 8;
template <int GROUP> constexpr int keys_at_once() {
  return std::min(WIDTH, FEW ? (GROUP == 1 ? 8 : GROUP == 4 ? 2 : 4) : GROUP == 1 ? 16 : GROUP == 2 ? 8 : 4);
}
template <int GROUP> constexpr int parts_at_once() { return FEW ? (GROUP == 1 ? 8 : GROUP == 4 ? 2 : 4) : 4; }

// Keys begin .. end of a request for some of its KV heads. All of them if possible: the heads of a block lie side by
// side, so that memory is read in longer stretches.
struct DecodeItem { int request, head, last_head, begin, end; };

// Running softmax of one query head. o: padded(head_size) sums of p v in the order of `Dot`, then 16 that add up to l.
struct Partial {
  float max;
  float *o;
};

// K or V of the keys of a tile: key j at base[j] + at.
template <typename T> struct Keys {
  const T *const *base;
  int64_t at;

  const T *operator[](int j) const { return base[j] + at; }
};

// K or V of the tile that comes AHEAD, asked for line by line in the order of memory, into the second-level cache: one
// line between the products of as many bytes of this tile. A Zen 4 was slower when the lines were asked for out of order,
// and read half as many bytes a second into the first-level cache.
template <typename T> struct Coming {
  static constexpr int LINE = 64 / sizeof(T);  // elements
  const Keys<T> rows;
  const int size;
  int key = 0, element = 0;

  // always_inline: GCC 12 finds that a function that only prefetches has no effect, and drops the calls.
  [[gnu::always_inline]] void ask() {
    __builtin_prefetch(rows[key] + element, 0, 2);
    element += LINE;
    if (element >= size) element = 0, key++;
  }
};

// Scores of a query head, then weights.
struct alignas(64) Weights {
  float of[TILE];
};

// s [GROUP, TILE] = q K^T
template <class Dot, int GROUP>
[[gnu::noinline]] static void scores(const typename Dot::Query *const *q, const Keys<typename Dot::Key> &k,
                                     Coming<typename Dot::Key> coming, int size, Weights *s) {
  // Keys first + j STRIDE, so that the sums of a round fold into one vector of a head before the next one.
  constexpr int KEYS = keys_at_once<GROUP>(), STRIDE = WIDTH / KEYS;
  for (int from = 0; from < TILE; from += WIDTH) {
    Vec folded[GROUP][STRIDE];
#pragma GCC unroll 16
    for (int first = 0; first < STRIDE; first++) {
      const typename Dot::Key *row[KEYS];
      for (int j = 0; j < KEYS; j++) row[j] = k[from + first + j * STRIDE];
      Vec sum[GROUP][KEYS];
      for (int g = 0; g < GROUP; g++)
        for (int j = 0; j < KEYS; j++) sum[g][j] = Vec{};
      const auto multiply = [&](int d, int left) __attribute__((always_inline)) {
        for (int i = 0; i < Dot::VECTORS; i++) {
          typename Dot::Operand query[GROUP];
          for (int g = 0; g < GROUP; g++) query[g] = Dot::query(q[g] + d, i, left);
          for (int j = 0; j < KEYS; j++) {
            const typename Dot::Operand key = Dot::key(row[j] + d, i, left);
            if (i == 0 && d % coming.LINE == 0) coming.ask();
            for (int g = 0; g < GROUP; g++) sum[g][j] = Dot::multiply(sum[g][j], query[g], key);
          }
        }
      };
      int d = 0;
      for (; d + Dot::PART <= size; d += Dot::PART) multiply(d, Dot::PART);
      if (d < size) multiply(d, size - d);
      for (int g = 0; g < GROUP; g++) folded[g][first] = sum_each<WIDTH / 2, KEYS>(sum[g]);
    }
    for (int g = 0; g < GROUP; g++) store(s[g].of + from, sum_each<STRIDE / 2, STRIDE>(folded[g]));
  }
}

// Scores of `count` <= TILE keys -> weights, in place.
template <int DEGREE>
static inline void weigh(Partial &state, float *s, int count, int size, float scale, float cap) {
  Vec x[TILE / WIDTH], top = splat(-INFINITY);
  for (int i = 0; i < TILE / WIDTH; i++) {
    x[i] = load(s + i * WIDTH) * splat(scale);
    if (cap > 0) x[i] = soft_cap(x[i], cap * LOG2E);
    if (count < TILE) x[i] = choose(lanes() + i * WIDTH < count, x[i], splat(-INFINITY));
    top = maximum(top, x[i]);
  }
  float *o = state.o, *total = o + padded(size);
  if (any(top > splat(state.max + RAISE))) {
    const float highest = maximum(top);
    const Vec shrink = splat(std::exp2(state.max - highest));
    state.max = highest;
    for (int d = 0; d < padded(size) + 16; d += WIDTH) store(o + d, load(o + d) * shrink);
  }
  Vec sum = load(total);
  for (int i = 0; i < TILE / WIDTH; i++) {
    const Vec p = exp2<DEGREE>(x[i] - splat(state.max));
    store(s + i * WIDTH, p);
    sum += p;
  }
  store(total, sum);
}

// f(GROUP, first) for the query heads of a KV head: `count` of them, up to four at a time.
template <int GROUP = 4, class F> static inline void by_fours(int count, const F &f, int first = 0) {
  if (count >= GROUP) {
    f(std::integral_constant<int, GROUP>(), first);
    if (count > GROUP) by_fours<GROUP>(count - GROUP, f, first + GROUP);
  } else if constexpr (GROUP > 1) {
    by_fours<GROUP - 1>(count, f, first);
  }
}

// The heads of an attention layer that a tile is computed for.
struct Heads {
  int kv_heads, group;    // group: query heads of each KV head
  int64_t k, head, kind;  // elements: to K of the first one, from head to head, from K to V
  int size;
  float scale, cap;  // scale includes log2 e
};

// `count` <= TILE keys for all heads. rows: of KV head 0. coming: those of the tile AHEAD, or `rows` again.
// s [kv_heads group]: scratch.
template <class Dot>
static void attend_tile(const Heads &h, Partial *state, const typename Dot::Query *const *q,
                        const typename Dot::Key *const *rows, const typename Dot::Key *const *coming, int count,
                        Weights *s) {
  using Rows = Keys<typename Dot::Key>;
  // f(GROUP, its first head, K or V, what to ask for) for all heads; the first ones of a KV head ask.
  const auto for_all = [&](int64_t kind, const auto &f) {
    for (int head = 0; head < h.kv_heads; head++)
      by_fours(h.group, [&](auto group, int first) {
        const int64_t at = h.k + head * h.head + kind;
        const Rows next{first ? rows : coming, at};
        f(group, head * h.group + first, Rows{rows, at}, Coming<typename Dot::Key>{next, h.size});
      });
  };
  for_all(0, [&](auto group, int at, const Rows &k, const auto &next) {
    scores<Dot, decltype(group)::value>(q + at, k, next, h.size, s + at);
  });
  for (int i = 0; i < h.kv_heads * h.group; i++) weigh<Dot::DEGREE>(state[i], s[i].of, count, h.size, h.scale, h.cap);
  for_all(h.kind, [&](auto group, int at, const Rows &v, const auto &next) {
    Dot::template add<decltype(group)::value>(state + at, s + at, v, next, h.size);
  });
}
