// Rotary position embedding of q and k, half-split, and the write of k and v into the paged pool.
// float32 arithmetic, one rounding at the end. Heads are short: the compiler vectorises the loops.
#include "paged.h"
#include "vec.h"
#include <type_traits>

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

namespace {

constexpr int MAX_SIZE = 1024;        // elements of a head
constexpr int ELEMENTS_PER_THREAD = 1 << 14;  // below this, waking a thread costs more than it does

inline float widen(float x) { return x; }
inline float widen(Bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}
inline float widen(Fp16 x) { return _cvtsh_ss(x.bits); }

inline void narrow(float x, float *p) { *p = x; }
inline void narrow(float x, Bf16 *p) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  p->bits = (x != x ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline void narrow(float x, Fp16 *p) { p->bits = _cvtss_sh(x, 0); }

template <typename In, typename Out> void rotate(const In *x, const float *cos, const float *sin, Out *out, int half) {
  float wide[MAX_SIZE];
  for (int i = 0; i < half; i++) {
    const float first = widen(x[i]), second = widen(x[i + half]);
    wide[i] = first * cos[i] - second * sin[i];
    wide[i + half] = second * cos[i] + first * sin[i];
  }
  for (int i = 0; i < 2 * half; i++) narrow(wide[i], out + i);
}

template <typename In, typename Out> void copy(const In *x, Out *out, int size) {
  if constexpr (std::is_same_v<In, Out>) {
    memcpy(out, x, size * sizeof(In));
  } else {
    for (int i = 0; i < size; i++) narrow(widen(x[i]), out + i);
  }
}

template <typename In, typename Out> void write_token(const Write &w, int t) {
  const int size = w.kv.head_size, half = size / 2;
  const float *cos = w.cos + (int64_t)t * half, *sin = w.sin + (int64_t)t * half;
  if (w.cos)
    for (int h = 0; h < w.num_heads; h++) {
      In *q = (In *)w.q + t * w.q_row + h * w.q_head;
      rotate(q, cos, sin, q, half);
    }
  const int64_t slot = w.slots[t];
  if (slot < 0) return;
  const int64_t at = slot / w.kv.block_size * w.kv.block + slot % w.kv.block_size * w.kv.token;
  for (int h = 0; h < w.kv.num_kv_heads; h++) {
    Out *to = (Out *)w.kv.data + at + h * w.kv.head;
    const In *k = (const In *)w.k + t * w.k_row + h * w.k_head, *v = (const In *)w.v + t * w.v_row + h * w.v_head;
    if (w.cos) rotate(k, cos, sin, to, half);
    else copy(k, to, size);
    copy(v, to + w.kv.kind, size);
  }
}

template <typename In, typename Out> void run(const Write &w) {
  const int64_t elements = (int64_t)w.num_tokens * (w.num_heads + 2 * w.kv.num_kv_heads) * w.kv.head_size;
#pragma omp parallel for num_threads(w.threads) if (w.threads > 1 && elements > ELEMENTS_PER_THREAD)
  for (int t = 0; t < w.num_tokens; t++) write_token<In, Out>(w, t);
}

template <typename In> void by_pool(const Write &w) {
  if (w.kv.dtype == FLOAT32) run<In, float>(w);
  else if (w.kv.dtype == BFLOAT16) run<In, Bf16>(w);
  else run<In, Fp16>(w);
}

}  // namespace

extern "C" void mooncake_write(const Write *w) {
  if (w->dtype == FLOAT32) by_pool<float>(*w);
  else if (w->dtype == BFLOAT16) by_pool<Bf16>(*w);
  else by_pool<Fp16>(*w);
}
