// Many tokens of one request, in pieces of PIECE tokens. It is the chunkwise form of the gated delta rule with its WY
// representation (arXiv 2412.06464, section 3.3 and appendix A), for a decay of each head or of each channel of the key.
//
// With e_t the factors of token t's decay, D_i = e_1 .. e_i and E_ij = e_(j+1) .. e_i, each for the rows c of S,
//
//     A_ij = sum_c k_ic k_jc E_ijc  (j < i)      P_ij = sum_c q_ic k_jc E_ijc  (j <= i)
//     v'_i = b_i (v_i - S^T (D_i k_i) - sum_j A_ij v'_j)
//     o_i  = S^T (D_i q_i) + sum_j P_ij v'_j
//     S   <- D S + sum_i (E_i k_i) v'_i^T        with D and E_i up to the last token
//
// The products with S and its update are products of matrices. The triangular system of b A is solved row by row for
// these right sides: its inverse, which the paper applies to the inputs of all pieces at once, would cost more here.
// Products of factors take the place of e^(G_i - G_j), so nothing overflows and no sums cancel.
#include "delta.h"
#include <omp.h>
#include <vector>

namespace {

constexpr int PIECE = 16;
// Sums that stay in registers: rows of a product x vectors. AVX2 has 16 registers, the others have 32.
constexpr int ROWS = WIDTH == 8 ? 4 : 8, VECTORS = 2;
constexpr int KEYS = 4;  // rows of S that are updated at once
static_assert(2 * PIECE % ROWS == 0 && WIDTH % KEYS == 0, "no rest");

// f(COUNT, first element) for the vectors of a row
template <class F> void by_vectors(int width, const F &f) {
  int j = 0;
  for (; j + VECTORS * WIDTH <= width; j += VECTORS * WIDTH) f(std::integral_constant<int, VECTORS>(), j);
  for (; j < width; j += WIDTH) f(std::integral_constant<int, 1>(), j);
}

// y [ROWS, width] = x S; x at `stride`, y and S [size, width]
template <int COUNT>
void multiply(const float *x, int stride, const float *s, int size, int width, float *y) {
  Vec sum[ROWS][COUNT];
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < COUNT; i++) sum[r][i] = Vec{};
  for (int c = 0; c < size; c++) {
    Vec of_s[COUNT];
    for (int i = 0; i < COUNT; i++) of_s[i] = load(s + (int64_t)c * width + i * WIDTH);
    for (int r = 0; r < ROWS; r++) {
      const Vec factor = splat(x[r * stride + c]);
      for (int i = 0; i < COUNT; i++) sum[r][i] += factor * of_s[i];
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < COUNT; i++) store(y + r * width + i * WIDTH, sum[r][i]);
}

// KEYS rows of S: s = total s + k^T v for `count` tokens; k at `stride`, v at `width`
template <int COUNT>
void update(float *s, const float *total, const float *k, int stride, const float *v, int count, int width) {
  Vec sum[KEYS][COUNT];
  for (int r = 0; r < KEYS; r++)
    for (int i = 0; i < COUNT; i++) sum[r][i] = splat(total[r]) * load(s + (int64_t)r * width + i * WIDTH);
  for (int t = 0; t < count; t++) {
    Vec of_v[COUNT];
    for (int i = 0; i < COUNT; i++) of_v[i] = load(v + t * width + i * WIDTH);
    for (int r = 0; r < KEYS; r++) {
      const Vec factor = splat(k[t * stride + r]);
      for (int i = 0; i < COUNT; i++) sum[r][i] += factor * of_v[i];
    }
  }
  for (int r = 0; r < KEYS; r++)
    for (int i = 0; i < COUNT; i++) store(s + (int64_t)r * width + i * WIDTH, sum[r][i]);
}

// y += factor x
inline void add(float *y, float factor, const float *x, int width) {
  const Vec f = splat(factor);
  for (int j = 0; j < width; j += WIDTH) store(y + j, load(y + j) + f * load(x + j));
}

// Columns from .. to of the matrix of one head
template <typename T> class Chunk {
 public:
  explicit Chunk(const Delta &d)
      : d(d), keys(padded(d.key_size)), widest(padded(d.value_size)), s((size_t)keys * widest),
        q((size_t)PIECE * keys), k(q), gain(q), late(q), x(2 * q.size()), y((size_t)2 * PIECE * widest),
        v((size_t)PIECE * widest), total(keys) {}

  void compute(int head, int from, int to) {
    const int count = to - from, width = padded(count), size = d.key_size;
    const State before{d, d.read}, after{d, d.write};
    std::fill(s.begin(), s.end(), 0.f);
    const auto rows = [&](const auto &f) {
      for (int c = 0; c < size; c++) f(((int64_t)head * size + c) * d.value_size + from, s.data() + (int64_t)c * width);
    };
    if (!d.fresh || !*d.fresh) rows([&](int64_t element, float *row) { before.get(element, count, row); });
    for (int first = 0; first < d.rows; first += PIECE) {
      const int tokens = std::min(PIECE, d.rows - first);
      prepare(first, tokens, head);
      for (int r = 0; r < 2 * tokens; r += ROWS)
        by_vectors(width, [&](auto vectors, int j) {
          multiply<decltype(vectors)::value>(&x[(size_t)r * keys], keys, &s[j], size, width, &y[(size_t)r * width + j]);
        });
      for (int i = 0; i < tokens; i++) token(first + i, i, tokens, head, from, count, width);
      for (int c = 0; c < keys; c += KEYS)
        by_vectors(width, [&](auto vectors, int j) {
          update<decltype(vectors)::value>(&s[(size_t)c * width + j], &total[c], &late[c], keys, &v[j], tokens, width);
        });
    }
    rows([&](int64_t element, const float *row) { after.put(element, count, row); });
  }

 private:
  // Of a piece: x = (D k, then D q), late = E k, total = D, and the products of pairs
  void prepare(int first, int tokens, int head) {
    const int size = d.key_size, key_head = d.key_head(head);
    for (int i = 0; i < tokens; i++) {
      unit(row_of<T>(d.q, d.q_row, first + i, key_head, size), &q[(size_t)i * keys], size, 1 / std::sqrt((float)size));
      unit(row_of<T>(d.k, d.k_row, first + i, key_head, size), &k[(size_t)i * keys], size, 1);
      gains(d, first + i, head, &gain[(size_t)i * keys]);
    }
    for (int c = 0; c < keys; c += WIDTH) {
      Vec product = splat(1);
      for (int i = 0; i < tokens; i++) {
        product *= load(&gain[(size_t)i * keys + c]);
        store(&x[(size_t)i * keys + c], product * load(&k[(size_t)i * keys + c]));
        store(&x[(size_t)(tokens + i) * keys + c], product * load(&q[(size_t)i * keys + c]));
      }
      store(&total[c], product);
      product = splat(1);
      for (int i = tokens - 1; i >= 0; i--) {
        store(&late[(size_t)i * keys + c], product * load(&k[(size_t)i * keys + c]));
        product *= load(&gain[(size_t)i * keys + c]);
      }
    }
    for (int j = 0; j < tokens; j++) pairs_with(j, tokens);
  }

  // (k_i, k_j) and (q_i, k_j) for i >= j, the factors between them included
  void pairs_with(int j, int tokens) {
    Vec of_k[PIECE] = {}, of_q[PIECE] = {};
    for (int c = 0; c < keys; c += WIDTH) {
      Vec key = load(&k[(size_t)j * keys + c]);
      of_q[j] += key * load(&q[(size_t)j * keys + c]);
      for (int i = j + 1; i < tokens; i++) {
        key *= load(&gain[(size_t)i * keys + c]);
        of_k[i] += key * load(&k[(size_t)i * keys + c]);
        of_q[i] += key * load(&q[(size_t)i * keys + c]);
      }
    }
    for (int i = j; i < tokens; i++) system[i][j] = sum(of_k[i]), scores[i][j] = sum(of_q[i]);
  }

  // v' and o of token i of the piece; those before it are done
  void token(int64_t row, int i, int tokens, int head, int from, int count, int width) {
    const float rate = d.rate[row * d.value_heads + head];
    float *own = &v[(size_t)i * width], *out = &y[(size_t)(tokens + i) * width];
    widen(row_of<T>(d.v, d.v_row, row, head, d.value_size) + from, own, count);
    add(own, -1, &y[(size_t)i * width], width);
    for (int j = 0; j < i; j++) add(own, -system[i][j], &v[(size_t)j * width], width);
    for (int j = 0; j < width; j += WIDTH) store(own + j, splat(rate) * load(own + j));
    for (int j = 0; j <= i; j++) add(out, scores[i][j], &v[(size_t)j * width], width);
    narrow(out, (T *)d.out + (row * d.value_heads + head) * d.value_size + from, count);
  }

  const Delta &d;
  const int keys, widest;
  std::vector<float> s, q, k, gain, late, x, y, v, total;
  float system[PIECE][PIECE], scores[PIECE][PIECE];
};

}  // namespace

extern "C" void mooncake_delta_chunk(const Delta *a) {
  const Delta &d = *a;
  // Columns of S do not depend on one another: with more threads than heads, a head is divided into slices.
  constexpr int SLICE = VECTORS * WIDTH;
  const int most = (d.value_size + SLICE - 1) / SLICE, wanted = std::min(most, std::max(1, d.threads / d.value_heads));
  const int columns = (most + wanted - 1) / wanted * SLICE, slices = (d.value_size + columns - 1) / columns;
  typed(d, [&](auto type) {
#pragma omp parallel num_threads(d.threads) if (d.threads > 1)
    {
      Chunk<decltype(type)> chunk(d);
#pragma omp for schedule(static)
      for (int i = 0; i < d.value_heads * slices; i++) {
        const int from = i % slices * columns;
        chunk.compute(i / slices, from, std::min(from + columns, d.value_size));
      }
    }
  });
}
