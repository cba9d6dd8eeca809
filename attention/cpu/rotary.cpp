// Rotary position embedding of q and k, half-split, and the write of k and v into the paged pool.
// float32 arithmetic, one rounding at the end.
#include "codes.h"
#include "paged.h"
#include "vectors/vec.h"
#include <algorithm>
#include <type_traits>

namespace {

constexpr int MAX_SIZE = 1024;        // elements of a head
constexpr int ELEMENTS_PER_THREAD = 1 << 14;  // below this, waking a thread costs more than it does

// A head of 16 elements, in one vector of 16.
template <typename In, typename Out> void rotate_eights(const In *x, const float *cos, const float *sin, Out *out) {
  alignas(64) float c[16], s[16];
  for (int i = 0; i < 16; i++) {
    c[i] = cos[i % 8];
    s[i] = i < 8 ? -sin[i] : sin[i - 8];
  }
  const Vec a = load(x);
  store(out, a * load(c) + exchange<8>(a) * load(s));
}

// The two halves of a head, WIDTH elements of each at a time; the last ones may reach over its end by being computed twice.
template <typename In, typename Out> void rotate(const In *x, const float *cos, const float *sin, Out *out, int half) {
  if constexpr (WIDTH == 16)
    if (half == 8) return rotate_eights(x, cos, sin, out);
  Vec first[MAX_SIZE / 2 / WIDTH], second[MAX_SIZE / 2 / WIDTH];  // all read before any is written: x may be out
  const auto each = [&](auto body) {
    for (int i = 0, j = 0; i < half; i += WIDTH, j++) body(j, std::min(i, half - WIDTH));
  };
  each([&](int j, int i) {
    const Vec a = load(x + i), b = load(x + i + half), c = load(cos + i), s = load(sin + i);
    first[j] = a * c - b * s;
    second[j] = b * c + a * s;
  });
  each([&](int j, int i) {
    store(out + i, first[j]);
    store(out + i + half, second[j]);
  });
}

template <typename In, typename Out> void copy(const In *x, Out *out, int size) {
  if constexpr (std::is_same_v<In, Out>) {
    memcpy(out, x, size * sizeof(In));
  } else {
    for (int i = 0; i < size; i += WIDTH) store(out + i, load(x + i));
  }
}

// A row of k or v into the pool, rotated if there are angles; `offset`: of the token in its block.
template <typename In, typename Out>
void write_row(const Pool &kv, const In *x, const float *cos, const float *sin, Out *to, int offset) {
  if constexpr (std::is_same_v<Out, uint8_t>) {
    float row[MAX_SIZE];
    write_row(kv, x, cos, sin, row, offset);
    narrow(kv, row, to, offset);
  } else if (cos) {
    rotate(x, cos, sin, to, kv.head_size / 2);
  } else {
    copy(x, to, kv.head_size);
  }
}

template <typename In, typename Out> void write_token(const Write &w, int t) {
  const int half = w.kv.head_size / 2;
  const float *cos = w.cos + (int64_t)t * half, *sin = w.sin + (int64_t)t * half;
  if (w.cos)
    for (int h = 0; h < w.num_heads; h++) {
      In *q = (In *)w.q + t * w.q_row + h * w.q_head;
      rotate(q, cos, sin, q, half);
    }
  const int64_t slot = w.slots[t];
  if (slot < 0) return;
  const int offset = slot % w.kv.block_size;
  const int64_t at = slot / w.kv.block_size * w.kv.block + offset * w.kv.token;
  for (int h = 0; h < w.kv.num_kv_heads; h++) {
    Out *to = (Out *)w.kv.data + at + h * w.kv.head;
    const In *k = (const In *)w.k + t * w.k_row + h * w.k_head, *v = (const In *)w.v + t * w.v_row + h * w.v_head;
    write_row(w.kv, k, w.cos ? cos : nullptr, sin, to, offset);
    write_row(w.kv, v, (const float *)nullptr, sin, to + w.kv.kind, offset);
  }
}

template <typename In, typename Out> void run(const Write &w) {
  const int64_t elements = (int64_t)w.num_tokens * (w.num_heads + 2 * w.kv.num_kv_heads) * w.kv.head_size;
#pragma omp parallel for num_threads(w.threads) if (w.threads > 1 && elements > ELEMENTS_PER_THREAD)
  for (int t = 0; t < w.num_tokens; t++) write_token<In, Out>(w, t);
}

template <typename In> void by_pool(const Write &w) {
  if (w.kv.quantized()) run<In, uint8_t>(w);
  else if (w.kv.dtype == FLOAT32) run<In, float>(w);
  else if (w.kv.dtype == BFLOAT16) run<In, Bf16>(w);
  else run<In, Fp16>(w);
}

}  // namespace

extern "C" void mooncake_write(const Write *w) {
  if (w->dtype == FLOAT32) by_pool<float>(*w);
  else if (w->dtype == BFLOAT16) by_pool<Bf16>(*w);
  else by_pool<Fp16>(*w);
}
