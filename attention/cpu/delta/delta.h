// The common part of step.cpp and chunk.cpp: arguments, the state of a request in the pool, and rows of tokens.
// attention/delta_rule.py has the rule; attention/cpu/delta_rule.py mirrors the structs field by field.
//
// A head's state is a matrix [key_size, value_size] in float32, row by row. The heads of a layer follow one another, and
// a layer's state lies in one or more pieces of the request's blocks.
#pragma once
#include "paged.h"
#include "vectors/vec.h"
#include <algorithm>
#include <cmath>

struct Piece { int64_t part, begin, end; };  // elements begin .. end of the request's block of group `part`

struct Delta {
  const void *q, *k, *v;        // [rows, heads, size]: rows at q_row, .. elements, heads side by side
  const float *decay, *rate;    // [rows, value_heads (, key_size with by_channel)] <= 0; [rows, value_heads]
  void *out;                    // [rows, value_heads, value_size], of the type of q
  float *memory;                // [num_blocks, block]
  const Piece *pieces;          // of a state, in order
  const int64_t *read, *write;  // [requests, groups]: blocks
  const uint8_t *fresh;         // [requests]: begins with a state of zeros; null: none does
  int64_t q_row, k_row, v_row, block, groups;
  int32_t rows, key_heads, value_heads, key_size, value_size, by_channel, dtype, threads;

  int key_head(int head) const { return head / (value_heads / key_heads); }
};

constexpr float EPS = 1e-6f;  // added to the squared length of q and k

static inline int padded(int size) { return (size + WIDTH - 1) / WIDTH * WIDTH; }

// The state of one request: elements count from the first one of the layer.
struct State {
  const Delta &d;
  const int64_t *blocks;  // [groups]

  // The address of an element; *left: how many elements lie there side by side.
  float *at(int64_t element, int64_t *left) const {
    const Piece *piece = d.pieces;
    for (; element >= piece->end - piece->begin; piece++) element -= piece->end - piece->begin;
    *left = piece->end - piece->begin - element;
    return d.memory + blocks[piece->part] * d.block + piece->begin + element;
  }
  // f(address, offset, count) for each run of `count` elements that lie side by side
  template <class F> void runs(int64_t element, int64_t count, const F &f) const {
    for (int64_t done = 0, left; done < count; done += left) {
      float *run = at(element + done, &left);
      left = std::min(left, count - done);
      f(run, done, left);
    }
  }
  void get(int64_t element, int64_t count, float *to) const {
    runs(element, count, [&](const float *run, int64_t at, int64_t n) { memcpy(to + at, run, n * sizeof(float)); });
  }
  void put(int64_t element, int64_t count, const float *from) const {
    runs(element, count, [&](float *run, int64_t at, int64_t n) { memcpy(run, from + at, n * sizeof(float)); });
  }
};

// `size` elements -> floats, and zeros up to padded(size)
template <typename T> static inline void widen(const T *from, float *to, int size) {
  int i = 0;
  for (; i + WIDTH <= size; i += WIDTH) store(to + i, load(from + i));
  if (i < size) {
    T rest[WIDTH] = {};
    memcpy(rest, from + i, (size - i) * sizeof(T));
    store(to + i, load(rest));
  }
}

// padded(size) floats -> `size` elements
template <typename T> static inline void narrow(const float *from, T *to, int size) {
  int i = 0;
  for (; i + WIDTH <= size; i += WIDTH) store(to + i, load(from + i));
  if (i < size) {
    T rest[WIDTH];
    store(rest, load(from + i));
    memcpy(to + i, rest, (size - i) * sizeof(T));
  }
}

// A row of q or k -> the same with length `scale`
template <typename T> static inline void unit(const T *from, float *to, int size, float scale) {
  widen(from, to, size);
  Vec squares = {};
  for (int i = 0; i < size; i += WIDTH) squares += load(to + i) * load(to + i);
  const Vec factor = splat(scale / std::sqrt(sum(squares) + EPS));
  for (int i = 0; i < size; i += WIDTH) store(to + i, load(to + i) * factor);
}

// e^x for x <= 0, exact at 0: a decay is multiplied into the state at each token, so that a small error of the same sign
// would grow with the prompt, as that of vec.h's exp2 does.
static inline Vec exponential(Vec x) {
  constexpr float c[] = {0.5f, 1.6666667e-1f, 4.1666666e-2f, 8.3333333e-3f, 1.3888889e-3f, 1.9841270e-4f};
  const Vec t = x * splat(1.44269504f) + splat(0.5f);
  Vec whole;
  const Vec fraction = split(t, &whole), n = t - fraction;
  const Vec rest = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);  // x - n ln 2
  Vec p = splat(c[5]);
  for (int i = 4; i >= 0; i--) p = p * rest + splat(c[i]);
  return raise_to(p * rest * rest + rest + splat(1.0f), whole, t);
}

// The factors e^g [padded(key_size)] of a token's rows
static inline void gains(const Delta &d, int64_t row, int head, float *to) {
  const int64_t at = row * d.value_heads + head;
  if (d.by_channel) {
    widen(d.decay + at * d.key_size, to, d.key_size);
    for (int i = 0; i < d.key_size; i += WIDTH) store(to + i, exponential(load(to + i)));
  } else {
    const Vec gain = splat(std::exp(d.decay[at]));
    for (int i = 0; i < d.key_size; i += WIDTH) store(to + i, gain);
  }
}

// The row of one head's query, key or value
template <typename T> static inline const T *row_of(const void *x, int64_t stride, int64_t row, int head, int size) {
  return (const T *)x + row * stride + head * size;
}

// f(T()) with the type of the tokens
template <class F> static inline void typed(const Delta &d, const F &f) {
  if (d.dtype == FLOAT32) f(float());
  else if (d.dtype == BFLOAT16) f(Bf16());
  else f(Fp16());
}
