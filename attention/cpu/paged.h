// The arguments of every kernel: strided views of q and of one layer's paged pool, and the ragged batch.
// library.py mirrors the structs field by field.
#pragma once
#include "vectors/vec.h"
#include <cmath>
#include <cstdint>

enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, FP8 = 4 };  // the last two: see codes.h

// Elements at `p` + `at` of a type that is not quantized.
static inline Vec load_as(Dtype dtype, const void *p, int64_t at) {
  return dtype == FLOAT32 ? load((const float *)p + at)
         : dtype == BFLOAT16 ? load((const Bf16 *)p + at) : load((const Fp16 *)p + at);
}

static inline void store_as(Dtype dtype, void *p, int64_t at, Vec v) {
  if (dtype == FLOAT32) store((float *)p + at, v);
  else if (dtype == BFLOAT16) store((Bf16 *)p + at, v);
  else store((Fp16 *)p + at, v);
}

// kv [num_blocks, 2, num_kv_heads, block_size, head_size]; strides in elements, head_size contiguous. K and V may be the
// same memory.
struct Pool {
  void *data;
  int64_t block, kind, head, token;  // strides; `kind` leads from K to V, 0: they are the same
  int32_t num_kv_heads, block_size, head_size;
  Dtype dtype;

  bool quantized() const { return dtype >= INT8; }
};

// Rows cu_q[s] .. cu_q[s + 1] of q belong to request s and are the last of its ctx_lens[s] tokens.
struct Attend {
  Pool kv;
  const void *q;  // [T, num_heads, head_size]
  void *out;      // [T, num_heads, head_size] contiguous, of q's dtype; float32 with lse
  float *lse;     // [T, num_heads] or null: ln of the sum of each row's weights; only rows of one token
  const float *sinks;  // [num_heads] or null: one more score of every row, neither scaled nor capped, without a value
  const int32_t *block_tables, *cu_q, *ctx_lens;
  int64_t q_row, q_head, table_row;  // strides in elements
  int32_t first, last;               // the requests to compute
  int32_t num_heads, window, threads;
  Dtype dtype;
  float scale, soft_cap;

  int group() const { return num_heads / kv.num_kv_heads; }
  int64_t out_at(int row, int head) const { return ((int64_t)row * num_heads + head) * kv.head_size; }
  // The sum of a row's weights 2^(score - max), with that of the sink
  float with_sink(float total, float max, int head) const {
    return sinks ? total + std::exp2(sinks[head] * 1.44269504f - max) : total;
  }
};

// Rotates q and k, and writes k and v into the pool.
struct Write {
  Pool kv;
  void *q;               // [T, num_heads, head_size], rotated in place
  const void *k, *v;     // [T, num_kv_heads, head_size]
  const float *cos, *sin;  // [T, head_size / 2] contiguous; null = only write
  const int64_t *slots;  // [T]; -1 = skip
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;  // strides in elements
  int32_t num_tokens, num_heads, threads;
  Dtype dtype;
};

// One request's K or V of one head: where its token number j lies.
template <typename T> struct Tokens {
  const T *base;
  const int32_t *table;
  int64_t block, token;
  int block_size;

  Tokens(const Attend &a, int request, int head, int kind)
      : base((const T *)a.kv.data + kind * a.kv.kind + head * a.kv.head),
        table(a.block_tables + request * a.table_row), block(a.kv.block), token(a.kv.token),
        block_size(a.kv.block_size) {}

  const T *operator[](int j) const { return base + table[j / block_size] * block + (j % block_size) * token; }

  // Walks over the tokens from j on without a division for each.
  struct Cursor {
    const Tokens tokens;
    int index, offset;
    const T *at;

    Cursor(const Tokens &of, int j) : tokens(of), index(j / of.block_size), offset(j % of.block_size), at(of[j]) {}

    void advance(bool more) {  // `more`: there is a next token; without one the table may end here
      at += tokens.token;
      if (++offset == tokens.block_size && more) {
        offset = 0;
        at = tokens.base + tokens.table[++index] * tokens.block;
      }
    }
  };
};
