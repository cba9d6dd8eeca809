// y = x w^T for weights in groups of 32 inputs that share a scale: in memory as a GGUF file has them, never widened.
//
//     Q8_0   8.5 bits   w = d (q - 128)      q is the file's signed byte + 128
//     Q4_0   4.5 bits   w = d (q - 8)
//     Q4_1   5 bits     w = d q + m
//
// d and m are float16, q unsigned. A packed weight has the file's bytes, with OUTPUTS outputs woven together:
//
//     packed [ceil(n / OUTPUTS)][k / 32] of
//         d [OUTPUTS]; m [OUTPUTS] with Q4_1
//         q [2][8][WIDTH][4] with Q8_0: quads of inputs
//           [2][4][WIDTH][4] with Q4_*: quad i in the low halves of the bytes, quad i + 4 in the high ones
//
// A row of x is rounded in the same groups, x = e c with signed bytes c, so that a group's part of a result is
//
//     d e (sum of q c - offset sum of c)  +  m e (sum of c)
//
// The sum of q c is exact. Where the CPU multiplies quads of bytes (vpdpbusd) it is made in int32. With AVX2 and AVX-512
// alone it is made in int16 (vpmaddubsw): 16 products of 4 and 8 bits stay below 2^15, and 8-bit q are two halves.
#pragma once
#include "gemm_any.h"

constexpr int GROUP = 32;
constexpr int CODE_INTS = GROUP / 4 + 3;  // of a row's group

template <Kind KIND>
struct Format {
    static constexpr bool NIBBLES = KIND != Q8_0;
    static constexpr int OFFSET = KIND == Q8_0 ? 128 : KIND == Q4_0 ? 8 : 0;
    static constexpr int SCALES = KIND == Q4_1 ? 2 : 1;  // float16 numbers of an output
    static constexpr int QUADS = NIBBLES ? 4 : 8;        // groups of 4 bytes of an output
    static constexpr int BYTES = 2 * SCALES + 4 * QUADS;
    static constexpr int CODES = 2 * SCALES * OUTPUTS;  // where q begins
    // Rows of a tile: their integer sums stay in registers.
#if defined(__AVX512VNNI__)
    static constexpr int ROWS = 12;
#elif defined(__AVX512F__)
    static constexpr int ROWS = NIBBLES ? 12 : 6;
#elif defined(__AVX2__)
    static constexpr int ROWS = NIBBLES ? 4 : 2;
#else
    static constexpr int ROWS = 4;
#endif
};

// use(an integral_constant of the kind)
template <class Use>
auto with_kind(int64_t kind, const Use& use) {
    if (kind == Q8_0) return use(std::integral_constant<Kind, Q8_0>());
    if (kind == Q4_0) return use(std::integral_constant<Kind, Q4_0>());
    return use(std::integral_constant<Kind, Q4_1>());
}

inline int64_t group_bytes(int64_t kind) {
    return with_kind(kind, [](auto is) { return int64_t{Format<is>::BYTES}; });
}

inline Vec magnitude(Vec v) { return (Vec)((IntVec)v & INT32_MAX); }

// A group of a row of a tile of `rows`: quads of c, e, e (sum of c), sum of c, each `rows` numbers away from the last, so
// that a tile is read as one stream with constant distances.
inline void round_group(const Element* x, int rows, int32_t* to) {
    constexpr float TO_INTEGER = 12582912;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
    constexpr float LEAST = 1e-30f;
    Vec largest{}, total{};
    for (int i = 0; i < GROUP; i += WIDTH) largest = maximum(largest, magnitude(load(x + i)));
    const float most = maximum(largest), scale = most / 127;
    const Vec inverse = splat(most > LEAST ? 127 / most : 0);
    uint8_t codes[GROUP];
    for (int i = 0; i < GROUP; i += WIDTH) {
        const Vec moved = load(x + i) * inverse + splat(TO_INTEGER);
        store_bytes(codes + i, (IntVec)moved);
        total += moved - splat(TO_INTEGER);
    }
    const float sums = sum(total), scaled = scale * sums;
    for (int i = 0; i < GROUP / 4; i++) memcpy(to + i * rows, codes + 4 * i, 4);
    to += GROUP / 4 * rows;
    memcpy(to, &scale, 4);
    memcpy(to + rows, &scaled, 4);
    to[2 * rows] = (int32_t)sums;
}

inline IntVec load_ints(const uint8_t* p) {
    IntVec v;
    memcpy(&v, p, sizeof v);
    return v;
}

// Sums, lane by lane, of quads of unsigned bytes times quads of signed ones. HALVES: the unsigned ones are below 16.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
template <bool HALVES>
struct Dot {
    IntVec sum{};
    void add(IntVec w, IntVec x) { sum = (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
    IntVec get() const { return sum; }
};
#elif defined(__AVX512BW__) || defined(__AVX2__)
typedef int16_t Shorts __attribute__((vector_size(4 * WIDTH)));
#if defined(__AVX512BW__)
inline Shorts pairs(IntVec w, IntVec x) { return (Shorts)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
inline IntVec both(Shorts v, int16_t by) { return (IntVec)_mm512_madd_epi16((__m512i)v, _mm512_set1_epi16(by)); }
#else
inline Shorts pairs(IntVec w, IntVec x) { return (Shorts)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
inline IntVec both(Shorts v, int16_t by) { return (IntVec)_mm256_madd_epi16((__m256i)v, _mm256_set1_epi16(by)); }
#endif
template <bool HALVES>
struct Dot {
    Shorts low{}, high{};
    void add(IntVec w, IntVec x) {
        low += pairs(HALVES ? w : w & 0x0f0f0f0f, x);
        if (!HALVES) high += pairs(w >> 4 & 0x0f0f0f0f, x);
    }
    IntVec get() const { return HALVES ? both(low, 1) : both(low, 1) + both(high, 16); }
};
#else
template <bool HALVES>
struct Dot {
    IntVec sum{};
    void add(IntVec w, IntVec x) {
        for (int byte = 0; byte < 4; byte++) sum += (w >> 8 * byte & 0xff) * (x << (24 - 8 * byte) >> 24);
    }
    IntVec get() const { return sum; }
};
#endif

// c [COUNT, OUTPUTS] (+)= x [COUNT, groups] w [groups], one block of outputs. As in gemm_any.h, a row's result does not
// depend on COUNT. Of large tiles c stays in memory, or integer sums would leave the registers.
template <Kind KIND, int COUNT>
void group_tile(const int32_t* x, const uint8_t* w, int64_t groups, float* c, bool add) {
    using F = Format<KIND>;
    constexpr bool KEEP = 2 * COUNT <= F::ROWS;
    Vec kept[KEEP ? COUNT : 1][2];
    for (int r = 0; r < COUNT; r++)
        for (int h = 0; h < 2; h++) {
            float* at = c + r * OUTPUTS + h * WIDTH;
            if (!add && !KEEP) store(at, Vec{});
            if (KEEP) kept[r][h] = add ? load(at) : Vec{};
        }
    for (int64_t g = 0; g < groups; g++, x += CODE_INTS * COUNT, w += F::BYTES * OUTPUTS) {
        for (int at = 0; at < F::BYTES * OUTPUTS; at += 64) __builtin_prefetch(w + AHEAD_BYTES + at, 0, 2);
        Dot<F::NIBBLES> dot[COUNT][2];
        for (int i = 0; i < F::QUADS; i++) {
            IntVec low[2], high[2];
            for (int h = 0; h < 2; h++) {
                const IntVec q = load_ints(w + F::CODES + (h * F::QUADS + i) * WIDTH * 4);
                low[h] = F::NIBBLES ? q & 0x0f0f0f0f : q;
                high[h] = q >> 4 & 0x0f0f0f0f;
            }
#pragma GCC unroll 12
            for (int r = 0; r < COUNT; r++) {
                const IntVec codes = x[i * COUNT + r] - IntVec{};
                for (int h = 0; h < 2; h++) dot[r][h].add(low[h], codes);
            }
            if (!F::NIBBLES) continue;
#pragma GCC unroll 12
            for (int r = 0; r < COUNT; r++) {
                const IntVec codes = x[(i + F::QUADS) * COUNT + r] - IntVec{};
                for (int h = 0; h < 2; h++) dot[r][h].add(high[h], codes);
            }
        }
        const int32_t* row = x + GROUP / 4 * COUNT;
        const float* scale = (const float*)row;
        for (int h = 0; h < 2; h++) {
            const Fp16* scales = (const Fp16*)w + h * WIDTH;
            const Vec d = load(scales), m = F::SCALES == 2 ? load(scales + OUTPUTS) : Vec{};
#pragma GCC unroll 12
            for (int r = 0; r < COUNT; r++) {
                float* at = c + r * OUTPUTS + h * WIDTH;
                const IntVec sums = dot[r][h].get() - F::OFFSET * row[2 * COUNT + r];
                Vec to = KEEP ? kept[KEEP ? r : 0][h] : load(at);
                to += __builtin_convertvector(sums, Vec) * (d * splat(scale[r]));
                if (F::SCALES == 2) to += m * splat(scale[COUNT + r]);
                if (KEEP)
                    kept[KEEP ? r : 0][h] = to;
                else
                    store(at, to);
            }
        }
    }
    if (KEEP)
        for (int r = 0; r < COUNT; r++)
            for (int h = 0; h < 2; h++) store(c + r * OUTPUTS + h * WIDTH, kept[KEEP ? r : 0][h]);
}

// `rows` rows of x, in tiles of COUNT and one of the rest, times the groups [first, end) of a block of outputs, at w.
template <Kind KIND, int COUNT = Format<KIND>::ROWS>
void group_tiles(const int32_t* x, int64_t groups, Range some, const uint8_t* w, float* c, int64_t rows) {
    for (; rows >= COUNT; rows -= COUNT, x += COUNT * groups * CODE_INTS, c += COUNT * OUTPUTS)
        group_tile<KIND, COUNT>(x + some.begin * CODE_INTS * COUNT, w, some.size(), c, some.begin > 0);
    if constexpr (COUNT > 1)
        if (rows) group_tiles<KIND, COUNT - 1>(x, groups, some, w, c, rows);
}

// The rounding of x takes so little time that each thread does its own.
template <class Epilogue>
void product_of_groups(const Element* x, int64_t stride, Range rows, const Weight& w, Range blocks,
                       const Epilogue& epilogue) {
    if (!rows.size()) return;
    static thread_local std::vector<int32_t> codes;
    static thread_local std::vector<float> sums;
    const int64_t groups = w.k / GROUP, bytes = group_bytes(w.kind) * OUTPUTS, chunk = CHUNK_BYTES / bytes;
    const auto tiles = with_kind(w.kind, [](auto is) { return &group_tiles<is>; });
    const int64_t most = with_kind(w.kind, [](auto is) { return int64_t{Format<is>::ROWS}; });
    codes.resize(rows.size() * groups * CODE_INTS);
    sums.resize(rows.size() * OUTPUTS);
    for (int64_t i = 0; i < rows.size(); i++) {
        const int64_t first = i / most * most, count = std::min(most, rows.size() - first);
        for (int64_t g = 0; g < groups; g++)
            round_group(x + (rows.begin + i) * stride + g * GROUP, count,
                        codes.data() + (first * groups + g * count) * CODE_INTS + i - first);
    }
    const uint8_t* packed = (const uint8_t*)w.packed;
    for (int64_t b = blocks.begin; b < blocks.end; b++) {
        for (int64_t g = 0; g < groups; g += chunk)
            tiles(codes.data(), groups, {g, std::min(g + chunk, groups)}, packed + (b * groups + g) * bytes, sums.data(),
                  rows.size());
        finish(rows, b, sums.data(), epilogue);
    }
}

template <class Epilogue>
void product(const Element* x, int64_t stride, Range rows, const Weight& w, Range blocks, const Epilogue& epilogue) {
    if (w.kind == ELEMENTS)
        product_of_elements(x, stride, rows, w, blocks, epilogue);
    else
        product_of_groups(x, stride, rows, w, blocks, epilogue);
}

// --- packing

// Where output `at` of group g has its scales (OUTPUTS apart) and its quads (WIDTH apart).
template <Kind KIND>
struct Place {
    uint16_t* scales;
    uint8_t* quads;
    Place(uint8_t* packed, int64_t groups, int64_t output, int64_t g) {
        uint8_t* group = packed + (output / OUTPUTS * groups + g) * Format<KIND>::BYTES * OUTPUTS;
        const int64_t at = output % OUTPUTS, half = at / WIDTH, lane = at % WIDTH;
        scales = (uint16_t*)group + at;
        quads = group + Format<KIND>::CODES + (half * Format<KIND>::QUADS * WIDTH + lane) * 4;
    }
};

// One output's groups as the file has them: d, m with Q4_1, bytes in the order of quads.
template <Kind KIND>
void pack_output(const uint8_t* row, int64_t groups, int64_t output, uint8_t* packed) {
    using F = Format<KIND>;
    for (int64_t g = 0; g < groups; g++, row += F::BYTES) {
        const Place<KIND> to(packed, groups, output, g);
        for (int i = 0; i < F::SCALES; i++) memcpy(to.scales + i * OUTPUTS, row + 2 * i, 2);
        for (int i = 0; i < 4 * F::QUADS; i++)
            to.quads[i / 4 * WIDTH * 4 + i % 4] = row[2 * F::SCALES + i] ^ (KIND == Q8_0 ? 0x80 : 0);
    }
}

template <Kind KIND>
void widen_output(const uint8_t* packed, int64_t groups, int64_t output, Element* y) {
    using F = Format<KIND>;
    for (int64_t g = 0; g < groups; g++, y += GROUP) {
        const Place<KIND> from(const_cast<uint8_t*>(packed), groups, output, g);
        Fp16 scales[2][WIDTH] = {};
        for (int i = 0; i < F::SCALES; i++) scales[i][0].bits = from.scales[i * OUTPUTS];
        const float d = load(scales[0])[0], m = load(scales[1])[0];
        float values[GROUP];
        for (int i = 0; i < GROUP; i++) {
            const int at = F::NIBBLES ? i % 16 : i;
            const uint8_t byte = from.quads[at / 4 * WIDTH * 4 + at % 4];
            const int q = !F::NIBBLES ? byte : i < 16 ? byte & 15 : byte >> 4;
            values[i] = d * (q - F::OFFSET) + m;
        }
        for (int i = 0; i < GROUP; i += WIDTH) store(y + i, load(values + i));
    }
}

// Row `output` of a packed weight, not gated -> y [k].
inline void read_output(const Weight& w, int64_t output, Element* y) {
    if (w.kind == ELEMENTS)
        for (int64_t j = 0; j < w.k; j++) y[j] = w.packed[packed_at(w, output, j)];
    else
        with_kind(w.kind, [&](auto is) { widen_output<is>((const uint8_t*)w.packed, w.k / GROUP, output, y); });
}
