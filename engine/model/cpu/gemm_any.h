// y = x w^T by vector instructions of any level, for a weight packed once in the order in which it is read.
//
//     packed [ceil(n / OUTPUTS)][k][OUTPUTS]            elements in memory, float32 products
//     packed [ceil(n / OUTPUTS)][k / 2][OUTPUTS][2]     bfloat16 with an instruction for products of pairs (vdpbf16ps)
//
// A thread that computes a range of outputs reads one ascending stream of memory: at one row, this stream is the whole
// cost. At many rows, CHUNK_BYTES of it stay in the first-level cache for all rows of x, ROWS at a time.
#pragma once
#include <vector>

#include "team.h"
#include "vectors.h"

#if defined(__AVX512BF16__)
constexpr bool PAIRS = std::is_same_v<Element, Bf16>;
#else
constexpr bool PAIRS = false;
#endif
constexpr int STEP = PAIRS ? 2 : 1;  // inputs multiplied per instruction; k is a multiple of it
#include "weight.h"

// The micro-kernel: ROWS x 2 sums, 2 parts of the weight and a broadcast element of x stay in registers.
#if defined(__AVX512F__)
constexpr int ROWS = 12;  // 27 of 32
#elif defined(__AVX2__)
constexpr int ROWS = 6;  // 15 of 16
#else
constexpr int ROWS = 12;  // 27 of 32
#endif
constexpr int64_t CHUNK_BYTES = 24 << 10;
constexpr int64_t CHUNK = CHUNK_BYTES / (OUTPUTS * (int64_t)sizeof(Element)) / STEP;  // steps
constexpr int64_t AHEAD_BYTES = 2048;  // prefetch distance in the stream, at few rows

using Factor = std::conditional_t<PAIRS, Bf16, float>;  // the type of x in products

// Where element (output, input) of a packed weight is.
inline int64_t packed_at(const Weight& w, int64_t output, int64_t input) {
    const int64_t block = output / OUTPUTS * w.steps() * STEP * OUTPUTS;
    return block + input / STEP * STEP * OUTPUTS + output % OUTPUTS * STEP + input % STEP;
}

// sum += x[r][i] w[i][0 .. WIDTH), for one step i
inline Vec multiply(Vec sum, const Factor* x, const Element* w) {
    if constexpr (PAIRS) {
#ifdef __AVX512BF16__
        int32_t pair;
        memcpy(&pair, x, 4);
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(w));
#endif
    } else {
        return sum + splat(*(const float*)x) * load(w);
    }
}

// c [COUNT, OUTPUTS] (+)= x [COUNT, steps] w [steps, OUTPUTS]. The order of a sum is the same for every COUNT, so a
// row's result does not depend on the other rows.
template <int COUNT>
inline void tile(const Factor* x, int64_t stride, const Element* w, int64_t steps, float* c, bool add) {
    Vec sum[COUNT][2];
    for (int r = 0; r < COUNT; r++)
        for (int h = 0; h < 2; h++) sum[r][h] = add ? load(c + r * OUTPUTS + h * WIDTH) : Vec{};
    for (int64_t i = 0; i < steps; i++, w += STEP * OUTPUTS) {
        if (COUNT <= 4) __builtin_prefetch((const char*)w + AHEAD_BYTES, 0, 2);
        for (int r = 0; r < COUNT; r++)
            for (int h = 0; h < 2; h++)
                sum[r][h] = multiply(sum[r][h], x + r * stride + i * STEP, w + h * STEP * WIDTH);
    }
    for (int r = 0; r < COUNT; r++)
        for (int h = 0; h < 2; h++) store(c + r * OUTPUTS + h * WIDTH, sum[r][h]);
}

// As tile, for any number of rows.
template <int COUNT = ROWS>
inline void tiles(const Factor* x, int64_t stride, const Element* w, int64_t steps, float* c, bool add, int64_t rows) {
    for (; rows >= COUNT; rows -= COUNT, x += COUNT * stride, c += COUNT * OUTPUTS)
        tile<COUNT>(x, stride, w, steps, c, add);
    if constexpr (COUNT > 1)
        if (rows) tiles<COUNT - 1>(x, stride, w, steps, c, add, rows);
}

// A copy of rows of x in the order of the products, [chunks][rows][STRIDE], widened if products are float32. The copy is
// needed because rows at distances of a power of two evict each other from the first-level cache.
template <int64_t STRIDE>
class Factors {
  public:
    Factors(const Element* x, int64_t stride, Range rows, int64_t k) : count(rows.size()) {
        static thread_local std::vector<Factor> memory;
        memory.resize((k + STRIDE - 1) / STRIDE * count * STRIDE);
        at = memory.data();
        for (int64_t first = 0; first < k; first += STRIDE)
            for (int64_t i = 0; i < count; i++)
                copy(x + (rows.begin + i) * stride + first, std::min(STRIDE, k - first),
                     memory.data() + first * count + i * STRIDE);
    }
    const Factor* chunk(int64_t step) const { return at + step * STEP * count; }

  private:
    template <class From, class To>
    static void copy(const From* from, int64_t size, To* to) {
        if constexpr (std::is_same_v<From, To>)
            std::copy_n(from, size, to);
        else
            for (int64_t i = 0; i < size; i += WIDTH) store(to + i, load_first(from + i, size - i));
    }

    const Factor* at;
    int64_t count;
};

// The epilogue of sums [rows][OUTPUTS] of a block.
template <class Epilogue>
inline void finish(Range rows, int64_t block, const float* sums, const Epilogue& epilogue) {
    for (int64_t row = rows.begin; row < rows.end; row++, sums += OUTPUTS)
        epilogue(row, block, load(sums), load(sums + WIDTH));
}

// Rows [rows] of x (element stride `stride`) times the blocks [blocks] of w. epilogue (weight.h) gets each row of each
// block.
template <class Epilogue>
void product_of_elements(const Element* x, int64_t stride, Range rows, const Weight& w, Range blocks,
                         const Epilogue& epilogue) {
    if (!rows.size()) return;
    const Factors<CHUNK * STEP> factors(x, stride, rows, w.k);
    static thread_local std::vector<float> sums;
    sums.resize(rows.size() * OUTPUTS);
    for (int64_t b = blocks.begin; b < blocks.end; b++) {
        for (int64_t i = 0; i < w.steps(); i += CHUNK)
            tiles(factors.chunk(i), CHUNK * STEP, w.block(b) + i * STEP * OUTPUTS, std::min(CHUNK, w.steps() - i),
                  sums.data(), i > 0, rows.size());
        finish(rows, b, sums.data(), epilogue);
    }
}
