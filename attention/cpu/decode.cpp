// Paged decode attention: rows of one token each, split over (request, KV head, run of keys).
#include "decode.h"
#include <algorithm>
#include <omp.h>
#include <vector>

namespace {

constexpr int MIN_SPLIT = 256;       // keys: below this, merging costs more than a second thread gains
constexpr int ITEMS_PER_THREAD = 4;  // so that a long row does not leave the other threads waiting
constexpr int PREFETCH = 32;         // keys ahead

struct Item { int request, head, begin, end; int64_t partial; };  // partial: index of its first Partial

struct Plan {
  std::vector<Item> items;
  std::vector<int> first;  // [request * num_kv_heads + head] -> its first item; one more at the end
};

Plan plan_items(const Attend &a) {
  int64_t keys = 0;
  auto begin_of = [&](int s) { return a.window ? std::max(0, a.ctx_lens[s] - a.window) : 0; };
  for (int s = a.first; s < a.last; s++) keys += a.ctx_lens[s] - begin_of(s);
  const int64_t wanted = (int64_t)a.threads * ITEMS_PER_THREAD;
  int64_t length = a.threads == 1 ? INT32_MAX : std::max<int64_t>(MIN_SPLIT, keys * a.kv.num_kv_heads / wanted);
  Plan plan;
  for (int s = a.first; s < a.last; s++)
    for (int head = 0; head < a.kv.num_kv_heads; head++) {
      plan.first.push_back(plan.items.size());
      const int begin = begin_of(s), end = a.ctx_lens[s], runs = (end - begin + length - 1) / length;
      for (int i = 0; i < runs; i++) {
        const int from = begin + (int64_t)(end - begin) * i / runs, to = begin + (int64_t)(end - begin) * (i + 1) / runs;
        plan.items.push_back({s, head, from, to, (int64_t)plan.items.size() * a.group()});
      }
    }
  plan.first.push_back(plan.items.size());
  return plan;
}

template <class Dot, int GROUP, typename... Rest>
void attend_heads(int group, int g, Partial *state, const typename Dot::Query *const *q, Rest... rest) {
  if (group - g >= GROUP) {
    attend_tile<Dot, GROUP>(state + g, q + g, rest...);
    g += GROUP;
    if (g < group) attend_heads<Dot, GROUP>(group, g, state, q, rest...);
  } else if constexpr (GROUP > 1) {
    attend_heads<Dot, GROUP - 1>(group, g, state, q, rest...);
  }
}

template <class Dot>
void attend_item(const Attend &a, const Item &item, const typename Dot::Query *const *q, Partial *state) {
  using Key = typename Dot::Key;
  const Tokens<Key> keys(a, item.request, item.head, 0), values(a, item.request, item.head, 1);
  const int size = a.kv.head_size, bytes = size * sizeof(Key);
  const Key *k[TILE], *v[TILE];
  for (int j = item.begin; j < item.end; j += TILE) {
    const int count = std::min(TILE, item.end - j);
    for (int i = 0; i < TILE; i++) {
      // Beyond the last key, the last again: its weight is zero, and slots without a token may hold NaN.
      const int token = j + std::min(i, count - 1);
      k[i] = keys[token];
      v[i] = values[token];
      if (token + PREFETCH < item.end) {
        const char *next_k = (const char *)keys[token + PREFETCH], *next_v = (const char *)values[token + PREFETCH];
        for (int b = 0; b < bytes; b += 64) {
          _mm_prefetch(next_k + b, _MM_HINT_T0);
          _mm_prefetch(next_v + b, _MM_HINT_T0);
        }
      }
    }
    attend_heads<Dot, 4>(a.group(), 0, state, q, k, v, count, size, a.scale * LOG2E, a.soft_cap);
  }
}

// Merges the runs of one request and KV head and writes its rows.
template <class Dot> void finish(const Attend &a, const Item *items, int runs, Partial *partials) {
  const int group = a.group(), size = a.kv.head_size, row = a.cu_q[items->request];
  for (int g = 0; g < group; g++) {
    Partial &merged = partials[items[0].partial + g];
    for (int i = 1; i < runs; i++) {
      const Partial &other = partials[items[i].partial + g];
      const float max = std::max(merged.max, other.max);
      const float keep = std::exp2(merged.max - max), add = std::exp2(other.max - max);
      for (int d = 0; d < padded(size); d += 16)
        store(merged.o + d, load(merged.o + d) * splat(keep) + load(other.o + d) * splat(add));
      merged.total = merged.total * keep + other.total * add;
      merged.max = max;
    }
    Dot::in_order(merged.o, size);
    const int64_t at = a.out_at(row, items->head * group + g);
    for (int d = 0; d < size; d += 16) store_as(a.dtype, a.out, at + d, load(merged.o + d) * splat(1 / merged.total));
  }
}

// The query heads of a KV head as Dot wants them: in place, or widened into `wide` [group, head_size].
template <typename Query> void query_rows(const Attend &a, const Item &item, const Query **q, float *wide) {
  const int size = a.kv.head_size;
  for (int g = 0; g < a.group(); g++, wide += size) {
    const int64_t at = a.cu_q[item.request] * a.q_row + (item.head * a.group() + g) * a.q_head;
    if constexpr (sizeof(Query) == 2) {
      q[g] = (const Query *)a.q + at;
    } else {
      for (int d = 0; d < size; d += 16) store(wide + d, load_as(a.dtype, a.q, at + d));
      q[g] = wide;
    }
  }
}

template <class Dot> void attend_all(const Attend &a) {
  const Plan plan = plan_items(a);
  const int group = a.group(), length = padded(a.kv.head_size);
  const int64_t num_items = plan.items.size(), rows = plan.first.size() - 1;
  std::vector<float> sums(num_items * group * length, 0.f);
  std::vector<Partial> partials(num_items * group);
  for (size_t i = 0; i < partials.size(); i++) partials[i] = {-INFINITY, 0, sums.data() + i * length};
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    std::vector<const typename Dot::Query *> q(group);
    std::vector<float> wide(group * a.kv.head_size);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_items; i++) {
      const Item &item = plan.items[i];
      query_rows(a, item, q.data(), wide.data());
      attend_item<Dot>(a, item, q.data(), &partials[item.partial]);
    }
#pragma omp for
    for (int64_t r = 0; r < rows; r++)
      finish<Dot>(a, &plan.items[plan.first[r]], plan.first[r + 1] - plan.first[r], partials.data());
  }
}

}  // namespace

extern "C" void mooncake_decode(const Attend *a) {
#ifdef __AVX512BF16__
  if (a->dtype == BFLOAT16 && a->kv.dtype == BFLOAT16) return attend_all<Bf16Dot>(*a);
#endif
  if (a->kv.dtype == FLOAT32) return attend_all<FloatDot<float>>(*a);
  if (a->kv.dtype == BFLOAT16) return attend_all<FloatDot<Bf16>>(*a);
  return attend_all<FloatDot<Fp16>>(*a);
}
