// Paged decode attention: rows of one token each, split over (request, KV head, run of keys).
#include "decode.h"
#include "decode_amx.h"
#include "decode_bf16.h"
#include "decode_codes.h"
#include "decode_float.h"
#include <algorithm>
#include <atomic>
#include <omp.h>
#include <vector>

namespace {

constexpr int MIN_RUN = 64;          // keys: below this, merging costs more than a second thread gains
constexpr int ITEMS_PER_THREAD = 4;  // so that a long row does not leave the other threads waiting

struct Plan {
  std::vector<DecodeItem> items;
  std::vector<int> first;  // of each (request, group of heads) its first item, in order; and the end
};

Plan plan_items(const Attend &a) {
  auto begin_of = [&](int s) { return a.window ? std::max(0, a.ctx_lens[s] - a.window) : 0; };
  int64_t keys = 0, most = 0;
  for (int s = a.first; s < a.last; s++) {
    keys += a.ctx_lens[s] - begin_of(s);
    most += (a.ctx_lens[s] - begin_of(s) + MIN_RUN - 1) / MIN_RUN;
  }
  const int step = most >= a.threads ? a.kv.num_kv_heads : 1;  // heads of an item
  const int64_t wanted = std::max(1, a.threads * ITEMS_PER_THREAD * step / a.kv.num_kv_heads);
  const int64_t length = a.threads == 1 ? INT32_MAX : std::max<int64_t>(MIN_RUN, keys / wanted);
  Plan plan;
  for (int s = a.first; s < a.last; s++) {
    const int64_t begin = begin_of(s), count = a.ctx_lens[s] - begin, runs = (count + length - 1) / length;
    for (int head = 0; head < a.kv.num_kv_heads; head += step) {
      plan.first.push_back(plan.items.size());
      for (int64_t i = 0; i < runs; i++)
        plan.items.push_back({s, head, head + step, int(begin + count * i / runs), int(begin + count * (i + 1) / runs)});
    }
  }
  plan.first.push_back(plan.items.size());
  return plan;
}

// Rows of K of KV head 0 of the tile that begins at `key`; none beyond the item's end. The last key is repeated to
// the end of the tile: its weight there is zero, and slots without a token may hold NaN.
template <typename Key> bool gather(const Attend &a, const DecodeItem &item, int key, const Key **to) {
  const int count = std::min(TILE, item.end - key);
  if (count <= 0) return false;
  typename Tokens<Key>::Cursor cursor(Tokens<Key>(a, item.request, 0, 0), key);
  for (int i = 0; i < count; i++) {
    to[i] = cursor.at;
    cursor.advance(i + 1 < count);
  }
  std::fill(to + count, to + TILE, to[count - 1]);
  return true;
}

Heads heads_of(const Attend &a, const DecodeItem &item) {
  return {item.last_head - item.head, a.group(), item.head * a.kv.head, a.kv.head, a.kv.kind, a.kv.head_size,
          a.scale * LOG2E, a.soft_cap};
}

// q, state and s: of the item's query heads. `next`: what this thread will work on afterwards, or null.
template <class Dot>
void attend_item(const Attend &a, const DecodeItem &item, const DecodeItem *next,
                 const typename Dot::Query *const *q, Partial *state,
                 Weights *s) {
  constexpr int RING = AHEAD + 1;
  const Heads heads = heads_of(a, item);
  const typename Dot::Key *rows[RING][TILE];
  for (int t = 0; t < AHEAD; t++) gather(a, item, item.begin + t * TILE, rows[t]);
  int now = 0, after = next ? next->begin : 0;
  for (int j = item.begin; j < item.end; j += TILE, now = (now + 1) % RING) {
    const typename Dot::Key **coming = rows[(now + AHEAD) % RING];
    bool ask = gather(a, item, j + AHEAD * TILE, coming);
    if (!ask && next) {
      ask = gather(a, *next, after, coming);
      after += TILE;
    }
    attend_tile<Dot>(heads, state, q, rows[now], ask ? coming : rows[now], std::min(TILE, item.end - j), s);
  }
}

// Merges the runs of one request and its heads, `heads` query heads each, and writes their rows. Where the caller merges
// them with other keys, they stay float32 and their log-sum-exp goes with them.
template <class Kernel> void finish(const Attend &a, const DecodeItem &item, int runs, int heads, Partial *partials) {
  const int size = a.kv.head_size, row = a.cu_q[item.request];
  for (int h = 0; h < heads; h++) {
    Partial &merged = partials[h];
    for (int i = 1; i < runs; i++) {
      const Partial &other = partials[i * heads + h];
      const float max = std::max(merged.max, other.max);
      const float keep = std::exp2(merged.max - max), add = std::exp2(other.max - max);
      for (int d = 0; d < padded(size) + 16; d += WIDTH)
        store(merged.o + d, load(merged.o + d) * splat(keep) + load(other.o + d) * splat(add));
      merged.max = max;
    }
    Kernel::in_order(merged.o, size);
    const int head = item.head * a.group() + h;
    const float total = a.with_sink(sum(load(merged.o + padded(size))), merged.max, head);
    const Vec inverse = splat(1 / total);
    const int64_t at = a.out_at(row, head);
    if (a.lse) a.lse[(int64_t)row * a.num_heads + head] = (merged.max + std::log2(total)) / LOG2E;
    const Dtype dtype = a.lse ? FLOAT32 : a.dtype;
    for (int d = 0; d < size; d += WIDTH) store_as(dtype, a.out, at + d, load(merged.o + d) * inverse);
  }
}

// The item's query heads as Dot wants them: in place, or widened into `wide` [heads, padded(head_size)].
template <class Dot>
void query_rows(const Attend &a, const DecodeItem &item, const typename Dot::Query **q, float *wide) {
  const int size = a.kv.head_size;
  for (int h = item.head * a.group(); h < item.last_head * a.group(); h++, wide += padded(size)) {
    const int64_t at = a.cu_q[item.request] * a.q_row + h * a.q_head;
    if constexpr (sizeof(typename Dot::Query) == 2) {
      *q++ = (const typename Dot::Query *)a.q + at;
    } else {
      for (int d = 0; d < padded(size); d += WIDTH) store(wide + d, d < size ? load_as(a.dtype, a.q, at + d) : Vec{});
      Dot::split(wide, size);
      *q++ = wide;
    }
  }
}

// Dot products of rows by vector instructions, for any head size and block size.
template <class Dot> class DotKernel {
 public:
  DotKernel(const Attend &attend, int kv_heads)
      : a(attend), q(kv_heads * a.group()), wide(q.size() * padded(a.kv.head_size)), s(q.size()) {}

  void attend(const DecodeItem &item, const DecodeItem *next, Partial *partials) {
    query_rows<Dot>(a, item, q.data(), wide.data());
    attend_item<Dot>(a, item, next, q.data(), partials, s.data());
  }
  static void in_order(float *o, int size) { Dot::in_order(o, size); }

 private:
  const Attend &a;
  std::vector<const typename Dot::Query *> q;
  std::vector<float> wide;
  std::vector<Weights> s;
};

// Dot products of rows of codes.
template <class Dot> class CodesKernel {
  using S = Span<typename Dot::Key>;

 public:
  CodesKernel(const Attend &attend, int kv_heads)
      : a(attend), size(a.kv.head_size), q(kv_heads * a.group()), units(q.size()), wide(q.size() * padded(size)),
        rows(q.size()), s(q.size()) {
    most = TILE * std::max(1, std::min(TILES, SPAN_BYTES / (2 * TILE * kv_heads * size)));
  }

  // `next`: what this thread will work on afterwards, or null.
  void attend(const DecodeItem &item, const DecodeItem *next, Partial *partials) {
    query_rows<FloatDot<float>>(a, item, rows.data(), wide.data());
    for (size_t h = 0; h < q.size(); h++) {
      float *row = wide.data() + h * padded(size);
      units[h] = Dot::prepare(row, size);
      q[h] = (const typename Dot::Query *)row;
    }
    const Heads heads = heads_of(a, item);
    S span(a, item, item.begin, most);
    for (int key = item.begin; key < item.end; key += most) {
      const bool more = key + most < item.end;
      const S coming = more ? S(a, item, key + most, most) : next ? S(a, *next, next->begin, most) : span;
      attend_span<Dot>(heads, partials, q.data(), units.data(), span, coming, s.data());
      span = coming;
    }
  }
  static void in_order(float *o, int size) { Dot::in_order(o, size); }

 private:
  const Attend &a;
  const int size;
  int most;  // keys of a span
  std::vector<const typename Dot::Query *> q;
  std::vector<float> units, wide;
  std::vector<const float *> rows;
  std::vector<SpanWeights> s;
};

template <class Kernel> void attend_all(const Attend &a) {
  const Plan plan = plan_items(a);
  const int64_t num_items = plan.items.size(), rows = plan.first.size() - 1;
  if (num_items == 0) return;
  const int kv_heads = plan.items[0].last_head - plan.items[0].head, heads = kv_heads * a.group();
  const int length = padded(a.kv.head_size) + 16;
  std::vector<float> sums(num_items * heads * length, 0.f);
  std::vector<Partial> partials(num_items * heads);
  for (size_t i = 0; i < partials.size(); i++) partials[i] = {-INFINITY, sums.data() + i * length};
  std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    Kernel kernel(a, kv_heads);
    // The next item is taken before this one is computed, so that its first keys can be asked for.
    for (int64_t i = taken++, next; i < num_items; i = next) {
      next = taken++;
      kernel.attend(plan.items[i], next < num_items ? &plan.items[next] : nullptr, &partials[i * heads]);
    }
#pragma omp barrier
#pragma omp for
    for (int64_t r = 0; r < rows; r++) {
      const int first = plan.first[r];
      finish<Kernel>(a, plan.items[first], plan.first[r + 1] - first, heads, &partials[first * heads]);
    }
  }
}

#ifdef __AMX_BF16__
template <int HEADS> bool attend_tiles(const Attend &a) {
  switch (a.kv.head_size) {
    case 32: return attend_all<TileKernel<HEADS, 1>>(a), true;
    case 64: return attend_all<TileKernel<HEADS, 2>>(a), true;
    case 96: return attend_all<TileKernel<HEADS, 3>>(a), true;
    case 128: return attend_all<TileKernel<HEADS, 4>>(a), true;
  }
  return false;
}

// Whether AMX tiles can read this pool, and have.
bool attend_tiles(const Attend &a) {
  if (a.kv.block_size % 16) return false;
  const int group = a.group();
  return group == 1 ? attend_tiles<1>(a) : group == 2 ? attend_tiles<2>(a)
         : group <= 4 ? attend_tiles<4>(a) : attend_tiles<8>(a);
}
#endif

}  // namespace

extern "C" void mooncake_decode(const Attend *a) {
#ifdef __AVX512BF16__
  if (a->dtype == BFLOAT16 && (a->kv.dtype == BFLOAT16 || a->kv.quantized())) {
#ifdef __AMX_BF16__
    if (attend_tiles(*a)) return;
#endif
    if (!a->kv.quantized()) return attend_all<DotKernel<Bf16Dot>>(*a);
  }
#endif
#ifdef __AVX2__
  if (a->kv.dtype == INT8 && a->dtype != FLOAT32) return attend_all<CodesKernel<CodesDot>>(*a);
#endif
  if (a->kv.dtype == INT8) return attend_all<CodesKernel<FloatCodes<Int8>>>(*a);
  if (a->kv.dtype == FP8) return attend_all<CodesKernel<FloatCodes<E4m3>>>(*a);
  if (a->kv.dtype == FLOAT32) return attend_all<DotKernel<FloatDot<float>>>(*a);
  if (a->kv.dtype == BFLOAT16) return attend_all<DotKernel<FloatDot<Bf16>>>(*a);
  return attend_all<DotKernel<FloatDot<Fp16>>>(*a);
}
