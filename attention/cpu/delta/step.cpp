// One token of each request: the recurrence of attention/delta_rule.py, on the state where it lies.
//
// A head's matrix is read twice and written once: first for what it knows about the key, S^T k, then for the update and
// the output. The second time it comes from the core's cache, so that memory sees one read and one write.
#include "delta.h"
#include <omp.h>
#include <vector>

namespace {

constexpr int AT_ONCE = 4;  // rows of S: known and out are then loaded and stored once for all of them

// The rows of one head's matrix where they lie. Rows that the border of a piece cuts, or that do not end with a whole
// vector, are copies.
class Rows {
 public:
  explicit Rows(int key_size) : row(key_size) {}

  // fetch: whether copies get the content
  void open(const State &state, int head, bool fetch) {
    const int size = state.d.value_size, width = padded(size);
    copied.clear();
    const auto copy_of = [&](int c) {
      if (copies.empty()) copies.resize(row.size() * width);  // few states need them
      return copies.data() + (size_t)c * width;
    };
    for (int c = 0; c < (int)row.size(); c++) {
      const int64_t element = ((int64_t)head * row.size() + c) * size;
      int64_t left;
      row[c] = state.at(element, &left);
      if (left >= size && size == width) continue;
      row[c] = copy_of(c);
      copied.push_back(c);
      if (fetch) state.get(element, size, row[c]);
    }
  }
  void close(const State &state, int head) const {
    const int size = state.d.value_size;
    for (int c : copied) state.put(((int64_t)head * row.size() + c) * size, size, row[c]);
  }
  void all(float *same) { std::fill(row.begin(), row.end(), same); }
  float *const *data() const { return row.data(); }

 private:
  std::vector<float *> row;
  std::vector<float> copies;
  std::vector<int> copied;
};

// known += sum of factor[i] row[i]
template <int ROWS> void recall(float *const *row, const float *factor, float *known, int width) {
  Vec f[ROWS];
  for (int i = 0; i < ROWS; i++) f[i] = splat(factor[i]);
  for (int j = 0; j < width; j += WIDTH) {
    Vec sum = load(known + j);
    for (int i = 0; i < ROWS; i++) sum += f[i] * load(row[i] + j);
    store(known + j, sum);
  }
}

// to[i] = gain[i] from[i] + k[i] u     out += sum of q[i] to[i]
template <int ROWS>
void renew(float *const *from, float *const *to, const float *gain, const float *k, const float *q, const float *u,
           float *out, int width) {
  Vec g[ROWS], key[ROWS], query[ROWS];
  for (int i = 0; i < ROWS; i++) g[i] = splat(gain[i]), key[i] = splat(k[i]), query[i] = splat(q[i]);
  for (int j = 0; j < width; j += WIDTH) {
    const Vec update = load(u + j);
    Vec sum = load(out + j);
    for (int i = 0; i < ROWS; i++) {
      const Vec row = g[i] * load(from[i] + j) + key[i] * update;
      store(to[i] + j, row);
      sum += query[i] * row;
    }
    store(out + j, sum);
  }
}

// f(ROWS, first row) for all rows of a matrix
template <class F> void by_rows(int count, const F &f) {
  int c = 0;
  for (; c + AT_ONCE <= count; c += AT_ONCE) f(std::integral_constant<int, AT_ONCE>(), c);
  for (; c < count; c++) f(std::integral_constant<int, 1>(), c);
}

template <typename T> class Step {
 public:
  explicit Step(const Delta &d)
      : d(d), width(padded(d.value_size)), from(d.key_size), to(d.key_size), zeros(width), q(padded(d.key_size)), k(q), gain(q),
        factor(q), known(width), out(width), u(width) {}

  void compute(int64_t request, int head) {
    const State before{d, d.read + request * d.groups}, after{d, d.write + request * d.groups};
    if (d.fresh && d.fresh[request]) from.all(zeros.data());
    else from.open(before, head, true);
    to.open(after, head, false);
    const int size = d.key_size;
    unit(row_of<T>(d.q, d.q_row, request, d.key_head(head), size), q.data(), size, 1 / std::sqrt((float)size));
    unit(row_of<T>(d.k, d.k_row, request, d.key_head(head), size), k.data(), size, 1);
    gains(d, request, head, gain.data());
    for (int c = 0; c < size; c += WIDTH) store(&factor[c], load(&gain[c]) * load(&k[c]));
    std::fill(known.begin(), known.end(), 0.f);
    std::fill(out.begin(), out.end(), 0.f);
    by_rows(size, [&](auto rows, int c) {
      recall<decltype(rows)::value>(from.data() + c, &factor[c], known.data(), width);
    });
    widen(row_of<T>(d.v, d.v_row, request, head, d.value_size), u.data(), d.value_size);
    const Vec rate = splat(d.rate[request * d.value_heads + head]);
    for (int j = 0; j < width; j += WIDTH) store(&u[j], rate * (load(&u[j]) - load(&known[j])));
    by_rows(size, [&](auto rows, int c) {
      renew<decltype(rows)::value>(from.data() + c, to.data() + c, &gain[c], &k[c], &q[c], u.data(), out.data(), width);
    });
    to.close(after, head);
    narrow(out.data(), (T *)d.out + (request * d.value_heads + head) * d.value_size, d.value_size);
  }

 private:
  const Delta &d;
  const int width;
  Rows from, to;
  std::vector<float> zeros, q, k, gain, factor, known, out, u;
};

}  // namespace

extern "C" void mooncake_delta_step(const Delta *a) {
  const Delta &d = *a;
  typed(d, [&](auto type) {
#pragma omp parallel num_threads(d.threads) if (d.threads > 1)
    {
      Step<decltype(type)> step(d);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < (int64_t)d.rows * d.value_heads; i++)
        step.compute(i / d.value_heads, int(i % d.value_heads));
    }
  });
}
