// y = x w^T for weights of one byte with float32 scales: in memory as a checkpoint has them, never widened.
//
//     S8     w = s q, q signed     a scale for each output; rows of x are rounded to signed bytes, x = e c, with one e
//     E4M3   w = s q, q in e4m3    a scale for each output and 128 inputs; rows of x are not rounded
//
//     packed [ceil(n / OUTPUTS)] of
//         S8     s [OUTPUTS]; q + 128 [k / 4][2][WIDTH][4]
//         E4M3   groups of 128 inputs, the last one of k % 128: s [OUTPUTS]; q [inputs / STEP][OUTPUTS][STEP]
//
// S8: a result is s e (sum of (q + 128) c - 128 (sum of c)), or the sum of q c where the CPU multiplies signed bytes
// (dot.h); the sums are exact for k up to 2^16.
// E4M3: a group's sum is multiplied by s. For a few rows q is converted in registers, for more once for all of them, into
// the first-level cache. load_e4m3 gives 2^-8 of the values, so s is stored times 2^8.
#pragma once
#include "dot.h"

struct E4m3 {
    uint8_t bits;
};

constexpr int SHARED = 128;  // inputs with one scale of E4M3
constexpr int FEW_ROWS = 4;  // for which q is converted in registers
constexpr float E4M3_SCALE = 256;
constexpr int64_t CHUNK_QUADS = CHUNK_BYTES / (4 * OUTPUTS);
constexpr int S8_ROWS = dot_rows<8>();
constexpr int S8_MOVED = 128 - Dot<8>::MOVED;

inline int64_t packed_bytes_of(int64_t kind, int64_t k) {  // of one output
    return k + (int64_t)sizeof(float) * (kind == S8 ? 1 : (k + SHARED - 1) / SHARED);
}

// --- S8

// A row's codes, quads at distances of `rows`; its e, and S8_MOVED (sum of c).
inline void round_row(const Element* x, int64_t k, int64_t rows, int32_t* codes, float* step, int32_t* moved) {
    const float most = largest(x, k);
    const Vec inverse = inverse_step(most);
    Vec total{};
    for (int64_t i = 0; i < k; i += 32) {
        uint8_t bytes[32];
        total += round_numbers<32>(x + i, inverse, bytes);
        for (int j = 0; j < 8; j++) memcpy(codes + (i / 4 + j) * rows, bytes + 4 * j, 4);
    }
    *step = most / 127;
    *moved = S8_MOVED * (int32_t)sum(total);
}

// c [COUNT, OUTPUTS] (+)= x [quads][COUNT] w [quads]
template <int COUNT>
void int8_tile(const int32_t* x, const uint8_t* w, int64_t quads, int32_t* c, bool add) {
    for (int64_t at = 0; at < quads; at += DOT_QUADS) {
        Dot<8> dot[COUNT][2];
        const int64_t count = std::min(DOT_QUADS, quads - at);
        for (int64_t i = 0; i < count; i++, x += COUNT, w += 4 * OUTPUTS) {
            __builtin_prefetch(w + AHEAD_BYTES, 0, 2);
            const IntVec low = load_ints(w), high = load_ints(w + 4 * WIDTH);
#pragma GCC unroll 12
            for (int r = 0; r < COUNT; r++) {
                const IntVec codes = x[r] - IntVec{};
                dot[r][0].add(low, codes);
                dot[r][1].add(high, codes);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < COUNT; r++)
            for (int h = 0; h < 2; h++) {
                int32_t* to = c + r * OUTPUTS + h * WIDTH;
                const IntVec sums = dot[r][h].get() + (add || at ? load_ints((const uint8_t*)to) : IntVec{});
                memcpy(to, &sums, sizeof sums);
            }
    }
}

// As group_tiles: codes [quads of a row][rows of a tile] of each tile, quads [some].
template <int COUNT = S8_ROWS>
void int8_tiles(const int32_t* x, int64_t quads, Range some, const uint8_t* w, int32_t* c, int64_t rows) {
    for (; rows >= COUNT; rows -= COUNT, x += COUNT * quads, c += COUNT * OUTPUTS)
        int8_tile<COUNT>(x + some.begin * COUNT, w, some.size(), c, some.begin > 0);
    if constexpr (COUNT > 1)
        if (rows) int8_tiles<smaller(COUNT)>(x, quads, some, w, c, rows);
}

template <class Epilogue>
void product_of_int8(const Element* x, int64_t stride, Range rows, const Weight& w, Range blocks,
                     const Epilogue& epilogue) {
    if (!rows.size() || !blocks.size()) return;
    static thread_local std::vector<int32_t> codes, sums, moved;
    static thread_local std::vector<float> steps;
    const int64_t quads = w.k / 4;
    codes.resize(rows.size() * quads);
    sums.resize(rows.size() * OUTPUTS);
    moved.resize(rows.size());
    steps.resize(rows.size());
    for (int64_t first = 0, count; first < rows.size(); first += count) {
        count = tile_rows(S8_ROWS, rows.size() - first);
        for (int64_t i = first; i < first + count; i++)
            round_row(x + (rows.begin + i) * stride, w.k, count, codes.data() + first * quads + i - first, &steps[i],
                      &moved[i]);
    }
    for (int64_t b = blocks.begin; b < blocks.end; b++) {
        const uint8_t* packed = (const uint8_t*)w.packed + b * packed_bytes_of(S8, w.k) * OUTPUTS;
        const float* scale = (const float*)packed;
        const uint8_t* q = packed + sizeof(float) * OUTPUTS;
        for (int64_t at = 0; at < quads; at += CHUNK_QUADS)
            int8_tiles(codes.data(), quads, {at, std::min(at + CHUNK_QUADS, quads)}, q + at * 4 * OUTPUTS, sums.data(),
                       rows.size());
        for (int64_t i = 0; i < rows.size(); i++) {
            Vec half[2];
            for (int h = 0; h < 2; h++) {
                const IntVec exact = load_ints((const uint8_t*)(sums.data() + i * OUTPUTS + h * WIDTH)) - moved[i];
                half[h] = __builtin_convertvector(exact, Vec) * (load(scale + h * WIDTH) * splat(steps[i]));
            }
            epilogue(rows.begin + i, b, half[0], half[1]);
        }
    }
}

// --- E4M3

// What a multiplication takes of half a block's outputs: WIDTH numbers, or pairs of bfloat16.
using Half = std::conditional_t<PAIRS, IntVec, Vec>;

inline Vec read_half(const float* w) { return load(w); }
inline IntVec read_half(const Bf16* w) { return load_ints((const uint8_t*)w); }

#ifdef __AVX512BF16__
// 2^-8 of 32 values in bfloat16, as load_e4m3. The exponents of bfloat16 have a bias of 127, those of e4m3 one of 7.
// Below 2^-6 (codes 0 to 7) e4m3 has no leading one: a table gives m 2^-17.
inline IntVec e4m3_pairs(const E4m3* p) {
    alignas(64) static const uint16_t SUBNORMAL[32] = {0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860};
    typedef uint16_t Words __attribute__((vector_size(64)));
    const Words codes = (Words)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)), size = codes & 0x7f;
    const __mmask32 small = _mm512_cmplt_epu16_mask((__m512i)size, _mm512_set1_epi16(8));
    const Words normal = (size << 4) + ((127 - 7 - 8) << 7);
    const __m512i table = _mm512_load_si512(SUBNORMAL);
    return (IntVec)((Words)_mm512_mask_permutexvar_epi16((__m512i)normal, small, (__m512i)size, table) |
                    (codes & 0x80) << 8);
}
#endif

template <bool PAIRED = PAIRS>
inline std::conditional_t<PAIRED, IntVec, Vec> read_half(const E4m3* w) {
#ifdef __AVX512BF16__
    if constexpr (PAIRED) return e4m3_pairs(w);
#endif
    if constexpr (!PAIRED) return load_e4m3(&w->bits);
}

inline void write_half(float* to, Vec w) { store(to, w); }
inline void write_half(Bf16* to, IntVec w) { memcpy(to, &w, sizeof w); }

inline Vec multiply_half(Vec sum, const float* x, Vec w) { return sum + splat(*x) * w; }
#ifdef __AVX512BF16__
inline Vec multiply_half(Vec sum, const Bf16* x, IntVec w) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
}
#endif

// c [COUNT, OUTPUTS] += scale (x [COUNT, steps] w [steps, OUTPUTS]); From: E4m3 or Factor. A row's result does not depend
// on COUNT: a choice between = and += at the end would leave it to the compiler which of them rounds the product.
template <int COUNT, class From>
void scaled_tile(const Factor* x, const From* w, int64_t steps, const float* scale, float* c) {
    Vec sum[COUNT][2] = {};
    for (int64_t i = 0; i < steps; i++, x += STEP, w += STEP * OUTPUTS) {
        if (sizeof(From) == 1) __builtin_prefetch((const char*)w + AHEAD_BYTES, 0, 2);
        const Half low = read_half(w), high = read_half(w + STEP * WIDTH);
#pragma GCC unroll 12
        for (int r = 0; r < COUNT; r++) {
            sum[r][0] = multiply_half(sum[r][0], x + r * SHARED, low);
            sum[r][1] = multiply_half(sum[r][1], x + r * SHARED, high);
        }
    }
    for (int r = 0; r < COUNT; r++)
        for (int h = 0; h < 2; h++) {
            float* at = c + r * OUTPUTS + h * WIDTH;
            store(at, load(at) + sum[r][h] * load(scale + h * WIDTH));
        }
}

template <int COUNT, class From>
void scaled_tiles(const Factor* x, const From* w, int64_t steps, const float* scale, float* c, int64_t rows) {
    for (; rows >= COUNT; rows -= COUNT, x += COUNT * SHARED, c += COUNT * OUTPUTS)
        scaled_tile<COUNT>(x, w, steps, scale, c);
    if constexpr (COUNT > 1)
        if (rows) scaled_tiles<smaller(COUNT)>(x, w, steps, scale, c, rows);
}

template <class Epilogue>
void product_of_fp8(const Element* x, int64_t stride, Range rows, const Weight& w, Range blocks,
                    const Epilogue& epilogue) {
    if (!rows.size()) return;
    const Factors<SHARED> factors(x, stride, rows, w.k);
    static thread_local std::vector<float> sums;
    alignas(64) Factor wide[SHARED * OUTPUTS];
    for (int64_t b = blocks.begin; b < blocks.end; b++) {
        const uint8_t* at = (const uint8_t*)w.packed + b * packed_bytes_of(E4M3, w.k) * OUTPUTS;
        sums.assign(rows.size() * OUTPUTS, 0);
        for (int64_t first = 0; first < w.k; first += SHARED) {
            const int64_t steps = std::min<int64_t>(SHARED, w.k - first) / STEP;
            const float* scale = (const float*)at;
            const E4m3* q = (const E4m3*)(at + sizeof(float) * OUTPUTS);
            const Factor* part = factors.chunk(first / STEP);
            if (rows.size() <= FEW_ROWS) {
                scaled_tiles<FEW_ROWS>(part, q, steps, scale, sums.data(), rows.size());
            } else {
                for (int64_t i = 0; i < steps * STEP * OUTPUTS; i += STEP * WIDTH) write_half(wide + i, read_half(q + i));
                scaled_tiles<ROWS>(part, (const Factor*)wide, steps, scale, sums.data(), rows.size());
            }
            at = (const uint8_t*)q + steps * STEP * OUTPUTS;
        }
        finish(rows, b, sums.data(), epilogue);
    }
}

template <class Epilogue>
void product(const Element* x, int64_t stride, Range rows, const Weight& w, Range blocks, const Epilogue& epilogue) {
    if (w.kind == S8)
        product_of_int8(x, stride, rows, w, blocks, epilogue);
    else if (w.kind == E4M3)
        product_of_fp8(x, stride, rows, w, blocks, epilogue);
    else
        product_of_elements(x, stride, rows, w, blocks, epilogue);
}

// --- packing

// Where output `output` has its scale of input i, and input i itself.
struct BytePlace {
    uint8_t* block;
    int64_t at, kind;
    BytePlace(const Weight& w, int64_t output)
        : block((uint8_t*)w.packed + output / OUTPUTS * packed_bytes_of(w.kind, w.k) * OUTPUTS),
          at(output % OUTPUTS), kind(w.kind) {}
    float* scale(int64_t i) const { return (float*)group(i) + at; }
    uint8_t* byte(int64_t i) const {
        uint8_t* q = group(i) + sizeof(float) * OUTPUTS;
        if (kind == S8) return q + i / 4 * 4 * OUTPUTS + at * 4 + i % 4;
        return q + i % SHARED / STEP * STEP * OUTPUTS + at * STEP + i % STEP;
    }

  private:
    uint8_t* group(int64_t i) const {
        return kind == S8 ? block : block + i / SHARED * (SHARED + sizeof(float)) * OUTPUTS;
    }
};

// One output's q [k] and its scales, one or one for each group -> packed, whose memory is zeros.
inline void pack_bytes_of(const Weight& w, const uint8_t* q, const float* scales, int64_t output) {
    const BytePlace to(w, output);
    if (w.kind == S8)
        *to.scale(0) = *scales;
    else
        for (int64_t i = 0; i < w.k; i += SHARED) *to.scale(i) = scales[i / SHARED] * E4M3_SCALE;
    const int64_t adjacent = w.kind == S8 ? 4 : STEP;
    const uint8_t moved = w.kind == S8 ? 0x80 : 0;
    for (int64_t i = 0; i < w.k; i += adjacent) {
        uint8_t* at = to.byte(i);
        for (int64_t j = 0; j < adjacent; j++) at[j] = q[i + j] ^ moved;
    }
}

// Row `output` of a packed weight, not gated -> y [k].
inline void read_output(const Weight& w, int64_t output, Element* y) {
    if (w.kind == ELEMENTS) {
        for (int64_t j = 0; j < w.k; j++) y[j] = w.packed[packed_at(w, output, j)];
        return;
    }
    const BytePlace from(w, output);
    for (int64_t j = 0; j < w.k; j += WIDTH) {
        uint8_t codes[WIDTH];
        for (int i = 0; i < WIDTH; i++) codes[i] = *from.byte(j + i) ^ (w.kind == S8 ? 0x80 : 0);
        store(y + j, (w.kind == S8 ? load_int8(codes) : load_e4m3(codes)) * splat(*from.scale(j)));
    }
}
