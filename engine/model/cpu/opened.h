// Products of many rows by pairs of 16 bits, where the CPU does not multiply quads of bytes (AVX2).
//
// They are for weights of more than 4 bits. By bytes each of their products is two, of the halves of the weight (dot.h),
// whose sums leave registers for two rows of a tile only. So a chunk of the weight is opened once for all rows, in the
// first-level cache: its integers, less their offset, in 16 bits, and the products of its scales as floats. A tile has
// six rows, and the sums are the same integers, so a row's result does not depend on the number of rows.
//
// Pairs are of inputs 0 and 2 of a quad of inputs, then of 1 and 3, as a mask takes them out of its four bytes.
//
//     opened [groups] of d s [OUTPUTS]; m t [OUTPUTS]; q - offset [2 quads of a group][OUTPUTS][2]
#pragma once
#include "formats.h"

constexpr bool OPENING_PAYS = WIDTH == 8 && DOT_QUADS < INT32_MAX;
constexpr int64_t OPENED_LEAST_ROWS = 8;  // opening takes as long as the products of about four rows
constexpr int OPENED_ROWS = 6;            // of a tile: 15 of 16 registers

template <Kind KIND>
struct Opened {
    using F = Format<KIND>;
    static constexpr bool PAYS = OPENING_PAYS && F::BITS > 4;
    static constexpr int PAIRS = F::GROUP / 2, PAIRS_AT = F::SCALES * OUTPUTS;
    static constexpr int INTS = PAIRS_AT + PAIRS * OUTPUTS;  // of a group
    static constexpr int ROW_INTS = PAIRS + 2;               // of a row's rounded group
    static constexpr int64_t CHUNK_BLOCKS = std::max<int64_t>(1, CHUNK_BYTES / (4 * INTS * F::GROUPS));
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// A quad of unsigned integers of each output -> [2][OUTPUTS] pairs, of which these are half of the outputs.
inline void open_quads(IntVec quads, int16_t offset, int32_t* to) {
    for (int i = 0; i < 2; i++) {
        const Shorts pairs = (Shorts)(quads >> 8 * i & 0x00ff00ff) - offset;
        memcpy(to + i * OUTPUTS, &pairs, sizeof pairs);
    }
}

// A quad of a row's codes -> its pairs, `rows` numbers away from each other.
inline void open_codes(const uint8_t* quad, int64_t rows, int32_t* to) {
    for (int i = 0; i < 2; i++)
        to[i * rows] = (int32_t)((uint16_t)(int8_t)quad[i] | (uint32_t)(int8_t)quad[i + 2] << 16);
}

// sums [COUNT][2 halves] += x [COUNT] w [OUTPUTS]
template <int COUNT>
inline void multiply_pairs(IntVec (&sums)[COUNT][2], const int32_t* x, const int32_t* w) {
    const IntVec low = load_ints((const uint8_t*)w), high = load_ints((const uint8_t*)(w + WIDTH));
#pragma GCC unroll 6
    for (int r = 0; r < COUNT; r++) {
        const IntVec codes = x[r] - IntVec{};
        sums[r][0] = multiply_words(sums[r][0], low, codes);
        sums[r][1] = multiply_words(sums[r][1], high, codes);
    }
}

// As round_group: pairs of c, e, e (sum of c).
template <int GROUP>
void round_pairs(const Element* x, int rows, int32_t* to) {
    uint8_t codes[GROUP];
    float scale;
    const float sums = round_codes<GROUP>(x, codes, &scale), scaled = scale * sums;
    for (int i = 0; i < GROUP / 4; i++) open_codes(codes + 4 * i, rows, to + 2 * i * rows);
    to += GROUP / 2 * rows;
    memcpy(to, &scale, 4);
    memcpy(to + rows, &scaled, 4);
}

template <Kind KIND>
void open_blocks(const uint8_t* w, int64_t blocks, int32_t* to) {
    using F = Format<KIND>;
    using O = Opened<KIND>;
    const uint8_t* head = w;
    for (int64_t g = 0; g < blocks * F::GROUPS; g++, w += F::GROUP_BYTES, to += O::INTS) {
        if (g % F::GROUPS == 0) {
            head = w;
            w += F::HEAD_BYTES;
        }
        for (int h = 0; h < 2; h++) {
            int32_t* pairs = to + O::PAIRS_AT + h * WIDTH;
            Vec d, m;
            read_scales<KIND>(head, w, h, &d, &m);
            store((float*)to + h * WIDTH, d);
            if (F::SCALES == 2) store((float*)to + OUTPUTS + h * WIDTH, m);
            for (int i = 0; i < F::QUADS; i++) {
                IntVec low, high;
                read_quads<KIND>(w, i, h, &low, &high);
                open_quads(low, F::OFFSET, pairs + 2 * i * OUTPUTS);
                if (F::NIBBLES) open_quads(high, F::OFFSET, pairs + 2 * (i + F::QUADS) * OUTPUTS);
            }
        }
    }
}

// c [COUNT, OUTPUTS] (+)= x [groups][COUNT] w [groups], opened; see group_tile.
template <Kind KIND, int COUNT>
void opened_tile(const int32_t* x, const int32_t* w, int64_t groups, float* c, bool add) {
    using F = Format<KIND>;
    using O = Opened<KIND>;
    if (!add)  // not a choice between = and += below, for which the compiler rounds products another way
        for (int i = 0; i < COUNT * OUTPUTS; i += WIDTH) store(c + i, Vec{});
    for (int64_t g = 0; g < groups; g++, x += O::ROW_INTS * COUNT, w += O::INTS) {
        IntVec sums[COUNT][2] = {};
        for (int i = 0; i < O::PAIRS; i++) multiply_pairs<COUNT>(sums, x + i * COUNT, w + O::PAIRS_AT + i * OUTPUTS);
        const float* scale = (const float*)(x + O::PAIRS * COUNT);
        for (int h = 0; h < 2; h++) {
            const Vec d = load((const float*)w + h * WIDTH);
            const Vec m = F::SCALES == 2 ? load((const float*)w + OUTPUTS + h * WIDTH) : Vec{};
#pragma GCC unroll 6
            for (int r = 0; r < COUNT; r++) {
                float* at = c + r * OUTPUTS + h * WIDTH;
                Vec to = load(at);
                to += __builtin_convertvector(sums[r][h], Vec) * (d * splat(scale[r]));
                if (F::SCALES == 2) to += m * splat(scale[COUNT + r]);
                store(at, to);
            }
        }
    }
}

// As group_tiles, over opened groups [some].
template <Kind KIND, int COUNT = OPENED_ROWS>
void opened_tiles(const int32_t* x, int64_t groups, Range some, const int32_t* w, float* c, int64_t rows) {
    constexpr int64_t INTS = Opened<KIND>::ROW_INTS * COUNT;
    for (; rows >= COUNT; rows -= COUNT, x += INTS * groups, c += COUNT * OUTPUTS)
        opened_tile<KIND, COUNT>(x + some.begin * INTS, w, some.size(), c, some.begin > 0);
    if constexpr (COUNT > 1)
        if (rows) opened_tiles<KIND, smaller(COUNT)>(x, groups, some, w, c, rows);
}

template <Kind KIND, class Epilogue>
void product_of_opened(const Element* x, int64_t stride, Range rows, const Weight& w, Range outputs,
                       const Epilogue& epilogue) {
    using F = Format<KIND>;
    using O = Opened<KIND>;
    static thread_local std::vector<int32_t> codes;
    static thread_local std::vector<float> sums;
    alignas(64) int32_t opened[O::CHUNK_BLOCKS * F::GROUPS * O::INTS];
    const int64_t groups = w.k / F::GROUP, blocks = groups / F::GROUPS;
    codes.resize(rows.size() * groups * O::ROW_INTS);
    sums.resize(rows.size() * OUTPUTS);
    for (int64_t first = 0, count; first < rows.size(); first += count) {
        count = tile_rows(OPENED_ROWS, rows.size() - first);
        for (int64_t i = first; i < first + count; i++)
            for (int64_t g = 0; g < groups; g++)
                round_pairs<F::GROUP>(x + (rows.begin + i) * stride + g * F::GROUP, count,
                                      codes.data() + (first * groups + g * count) * O::ROW_INTS + i - first);
    }
    const uint8_t* packed = (const uint8_t*)w.packed;
    for (int64_t b = outputs.begin; b < outputs.end; b++) {
        for (int64_t at = 0, count; at < blocks; at += count) {
            count = std::min(O::CHUNK_BLOCKS, blocks - at);
            open_blocks<KIND>(packed + (b * blocks + at) * F::BYTES, count, opened);
            opened_tiles<KIND>(codes.data(), groups, {at * F::GROUPS, (at + count) * F::GROUPS}, opened, sums.data(),
                               rows.size());
        }
        finish(rows, b, sums.data(), epilogue);
    }
}
#endif
