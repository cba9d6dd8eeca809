// y = x w^T for weights in groups of inputs that share a scale: in memory as a GGUF file has them, never widened.
//
// formats.h has the layout. Where products of bytes are slow, many rows take the path of opened.h, with the same results.
#pragma once
#include "opened.h"

// A group of a row of a tile of `rows`: quads of c, e, e (sum of c), sum of c, each `rows` numbers away from the last, so
// that a tile is read as one stream with constant distances.
template <int GROUP>
void round_group(const Element* x, int rows, int32_t* to) {
    uint8_t codes[GROUP];
    float scale;
    const float sums = round_codes<GROUP>(x, codes, &scale), scaled = scale * sums;
    for (int i = 0; i < GROUP / 4; i++) memcpy(to + i * rows, codes + 4 * i, 4);
    to += GROUP / 4 * rows;
    memcpy(to, &scale, 4);
    memcpy(to + rows, &scaled, 4);
    to[2 * rows] = (int32_t)sums;
}

// c [COUNT, OUTPUTS] (+)= x [COUNT, blocks] w [blocks], OUTPUTS outputs. As in gemm_any.h, a row's result does not
// depend on COUNT. c stays in registers where there are enough for it and the integer sums: with AVX-512 always, because
// stores of its vectors take so long that more rows in a tile do not make up for them.
template <Kind KIND, int COUNT>
void group_tile(const int32_t* x, const uint8_t* w, int64_t blocks, float* c, bool add) {
    using F = Format<KIND>;
    constexpr bool KEEP = 2 * COUNT <= F::MOST_ROWS;
    Vec kept[KEEP ? COUNT : 1][2];
    for (int r = 0; r < COUNT; r++)
        for (int h = 0; h < 2; h++) {
            float* at = c + r * OUTPUTS + h * WIDTH;
            if (!add && !KEEP) store(at, Vec{});
            if (KEEP) kept[r][h] = add ? load(at) : Vec{};
        }
    const uint8_t* head = w;
    for (int64_t g = 0; g < blocks * F::GROUPS; g++, x += F::INTS * COUNT, w += F::GROUP_BYTES) {
        if (g % F::GROUPS == 0) {
            for (int at = 0; at < F::HEAD_BYTES; at += 64) __builtin_prefetch(w + AHEAD_BYTES + at, 0, 2);
            head = w;
            w += F::HEAD_BYTES;
        }
        for (int at = 0; at < F::GROUP_BYTES; at += 64) __builtin_prefetch(w + AHEAD_BYTES + at, 0, 2);
        Dot<F::BITS> dot[COUNT][2];
        for (int i = 0; i < F::QUADS; i++) {
            IntVec low[2], high[2];
            for (int h = 0; h < 2; h++) read_quads<KIND>(w, i, h, &low[h], &high[h]);
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
        const int32_t* row = x + F::GROUP / 4 * COUNT;
        const float* scale = (const float*)row;
        for (int h = 0; h < 2; h++) {
            Vec d, m;
            read_scales<KIND>(head, w, h, &d, &m);
#pragma GCC unroll 12
            for (int r = 0; r < COUNT; r++) {
                float* at = c + r * OUTPUTS + h * WIDTH;
                const IntVec sums = dot[r][h].get() - (F::OFFSET - Dot<F::BITS>::MOVED) * row[2 * COUNT + r];
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

// `rows` rows of x, in tiles of COUNT and smaller ones of the rest, times the blocks [some] of OUTPUTS outputs, at w.
template <Kind KIND, int COUNT = Format<KIND>::ROWS>
void group_tiles(const int32_t* x, int64_t blocks, Range some, const uint8_t* w, float* c, int64_t rows) {
    constexpr int64_t INTS = Format<KIND>::ROW_INTS * COUNT;
    for (; rows >= COUNT; rows -= COUNT, x += INTS * blocks, c += COUNT * OUTPUTS)
        group_tile<KIND, COUNT>(x + some.begin * INTS, w, some.size(), c, some.begin > 0);
    if constexpr (COUNT > 1)
        if (rows) group_tiles<KIND, smaller(COUNT)>(x, blocks, some, w, c, rows);
}

// The rounding of x takes so little time that each thread does its own.
template <Kind KIND, class Epilogue>
void product_of_kind(const Element* x, int64_t stride, Range rows, const Weight& w, Range outputs,
                     const Epilogue& epilogue) {
    using F = Format<KIND>;
    if (!rows.size() || !outputs.size()) return;
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (Opened<KIND>::PAYS)
        if (rows.size() >= OPENED_LEAST_ROWS)
            return product_of_opened<KIND>(x, stride, rows, w, outputs, epilogue);
#endif
    static thread_local std::vector<int32_t> codes;
    static thread_local std::vector<float> sums;
    const int64_t groups = w.k / F::GROUP, blocks = groups / F::GROUPS;
    constexpr int64_t CHUNK_BLOCKS = std::max<int64_t>(1, CHUNK_BYTES / F::BYTES);
    codes.resize(rows.size() * groups * F::INTS);
    sums.resize(rows.size() * OUTPUTS);
    for (int64_t first = 0, count; first < rows.size(); first += count) {
        count = tile_rows(F::ROWS, rows.size() - first);
        for (int64_t i = first; i < first + count; i++)
            for (int64_t g = 0; g < groups; g++)
                round_group<F::GROUP>(x + (rows.begin + i) * stride + g * F::GROUP, count,
                                      codes.data() + (first * groups + g * count) * F::INTS + i - first);
    }
    const uint8_t* packed = (const uint8_t*)w.packed;
    for (int64_t b = outputs.begin; b < outputs.end; b++) {
        for (int64_t at = 0; at < blocks; at += CHUNK_BLOCKS)
            group_tiles<KIND>(codes.data(), blocks, {at, std::min(at + CHUNK_BLOCKS, blocks)},
                              packed + (b * blocks + at) * F::BYTES, sums.data(), rows.size());
        finish(rows, b, sums.data(), epilogue);
    }
}

// The parts of a MIXED weight are whole blocks of outputs; a part with n = 0 ends the list.
template <class Epilogue>
void product_of_parts(const Element* x, int64_t stride, Range rows, const Weight& w, Range blocks,
                      const Epilogue& epilogue) {
    int64_t first = 0;  // block of the part
    for (const Weight* part = (const Weight*)w.packed; part->n; first += part->blocks(), part++) {
        const auto inside = [&](int64_t b) { return std::clamp<int64_t>(b - first, 0, part->blocks()); };
        const auto moved = [&](int64_t row, int64_t b, Vec low, Vec high) { epilogue(row, b + first, low, high); };
        with_kind(part->kind, [&](auto is) {
            product_of_kind<is>(x, stride, rows, *part, {inside(blocks.begin), inside(blocks.end)}, moved);
        });
    }
}

template <class Epilogue>
void product(const Element* x, int64_t stride, Range rows, const Weight& w, Range blocks, const Epilogue& epilogue) {
    if (w.kind == ELEMENTS)
        product_of_elements(x, stride, rows, w, blocks, epilogue);
    else if (w.kind == MIXED)
        product_of_parts(x, stride, rows, w, blocks, epilogue);
    else
        with_kind(w.kind, [&](auto is) { product_of_kind<is>(x, stride, rows, w, blocks, epilogue); });
}

// --- packing

// A block of one output as numbers.
template <Kind KIND>
struct Block {
    using F = Format<KIND>;
    typename F::Scale scales[2];  // d, m
    uint8_t factors[2][16];       // s, t of each group
    uint8_t q[F::GROUP * F::GROUPS];

    // The bytes of a GGUF file.
    explicit Block(const uint8_t* from) {
        const bool last = KIND == Q6_K;  // the only kind whose d is behind its q
        constexpr int BYTES = sizeof(scales[0]) * F::SCALES;
        memcpy(scales, last ? from + F::FILE_BYTES - BYTES : from, BYTES);
        if (!last) from += BYTES;
        if (KIND == Q8_0)
            for (int i = 0; i < 32; i++) q[i] = from[i] ^ 0x80;
        if (KIND == Q4_0 || KIND == Q4_1 || KIND == MXFP4)
            for (int i = 0; i < 32; i++) q[i] = i < 16 ? from[i] & 15 : from[i - 16] >> 4;
        if (KIND == Q4_K || KIND == Q5_K) {
            scales[1].bits ^= 0x8000;
            for (int j = 0; j < 8; j++) {
                const bool whole = j < 4;  // the others are in the low bits of one byte and the high ones of another
                factors[0][j] = whole ? from[j] & 63 : (from[j + 4] & 15) | from[j - 4] >> 6 << 4;
                factors[1][j] = whole ? from[j + 4] & 63 : from[j + 4] >> 4 | from[j] >> 6 << 4;
            }
            const uint8_t *high = from + 12, *low = high + (KIND == Q5_K ? 32 : 0);
            for (int i = 0; i < 256; i++) {
                q[i] = low[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
                if (KIND == Q5_K) q[i] |= (high[i % 32] >> i / 32 & 1) << 4;
            }
        }
        if (KIND == Q6_K) {
            memcpy(factors[0], from + 192, 16);
            for (int i = 0; i < 256; i++) {
                const int half = i / 128, part = i / 32 % 4;
                q[i] = from[half * 64 + part % 2 * 32 + i % 32] >> (part / 2 * 4) & 15;
                q[i] |= (from[128 + half * 32 + i % 32] >> (2 * part) & 3) << 4;
            }
        }
    }
};

// Where output `output` of block b has its numbers.
template <Kind KIND>
struct Place {
    using F = Format<KIND>;
    uint8_t* head;
    int64_t at;
    Place(uint8_t* packed, int64_t blocks, int64_t output, int64_t b)
        : head(packed + (output / OUTPUTS * blocks + b) * F::BYTES), at(output % OUTPUTS) {}
    auto* scale(int i) const { return (typename F::Scale*)head + i * OUTPUTS + at; }
    uint8_t* factor(int i, int g) const { return group(g) + i * OUTPUTS + at; }
    // q of input i: its byte, and whether it is in the high half; the byte of its bits above 4, and their place.
    uint8_t* byte(int i) const {
        const int quad = i % F::GROUP / 4 % F::QUADS;
        return group(i / F::GROUP) + F::QUADS_AT + ((at / WIDTH * F::QUADS + quad) * WIDTH + at % WIDTH) * 4 + i % 4;
    }
    static int shift(int i) { return i % F::GROUP / 4 / F::QUADS * 4; }
    uint8_t* high(int i) const { return group(i / F::GROUP) + F::HIGH_AT + at * 4 + i % 4; }
    static int high_shift(int i) { return i % F::GROUP / 4 * F::HIGH_BITS; }

  private:
    uint8_t* group(int g) const { return head + F::HEAD_BYTES + g * F::GROUP_BYTES; }
};

// One output's blocks as the file has them -> packed, whose memory is zeros.
template <Kind KIND>
void pack_output(const uint8_t* row, int64_t blocks, int64_t output, uint8_t* packed) {
    using F = Format<KIND>;
    for (int64_t b = 0; b < blocks; b++, row += F::FILE_BYTES) {
        const Place<KIND> to(packed, blocks, output, b);
        const Block<KIND> block(row);
        for (int i = 0; i < F::SCALES; i++) *to.scale(i) = block.scales[i];
        for (int i = 0; i < F::FACTORS; i++)
            for (int g = 0; g < F::GROUPS; g++) *to.factor(i, g) = block.factors[i][g];
        for (int i = 0; i < F::GROUP * F::GROUPS; i++) {
            if (!F::NIBBLES) {
                *to.byte(i) = block.q[i];
                continue;
            }
            *to.byte(i) |= (block.q[i] & 15) << to.shift(i);
            if (F::HIGH_BITS) *to.high(i) |= block.q[i] >> 4 << to.high_shift(i);
        }
    }
}

template <Kind KIND>
void widen_output(const uint8_t* packed, int64_t blocks, int64_t output, Element* y) {
    using F = Format<KIND>;
    for (int64_t b = 0; b < blocks; b++) {
        const Place<KIND> from(const_cast<uint8_t*>(packed), blocks, output, b);
        typename F::Scale scales[2][WIDTH] = {};
        for (int i = 0; i < F::SCALES; i++) scales[i][0] = *from.scale(i);
        for (int g = 0; g < F::GROUPS; g++, y += F::GROUP) {
            float d = load(scales[0])[0], m = F::SCALES == 2 ? load(scales[1])[0] : 0, values[F::GROUP];
            if (F::FACTORS > 0) d *= (int8_t)*from.factor(0, g);
            if (F::FACTORS > 1) m *= (int8_t)*from.factor(1, g);
            for (int j = 0; j < F::GROUP; j++) {
                const int i = g * F::GROUP + j;
                int q = *from.byte(i);
                if (F::NIBBLES) q = q >> from.shift(i) & 15;
                if (KIND == MXFP4) q = E2M1[q];
                if (F::HIGH_BITS) q |= (*from.high(i) >> from.high_shift(i) & ((1 << F::HIGH_BITS) - 1)) << 4;
                values[j] = d * (q - F::OFFSET) + m;
            }
            for (int j = 0; j < F::GROUP; j += WIDTH) store(y + j, load(values + j));
        }
    }
}

// Row `output` of a packed weight, not gated -> y [k].
inline void read_output(const Weight& w, int64_t output, Element* y) {
    if (w.kind == ELEMENTS)
        for (int64_t j = 0; j < w.k; j++) y[j] = w.packed[packed_at(w, output, j)];
    else
        with_kind(w.kind, [&](auto is) {
            const int64_t blocks = w.k / (Format<is>::GROUP * Format<is>::GROUPS);
            widen_output<is>((const uint8_t*)w.packed, blocks, output, y);
        });
}
