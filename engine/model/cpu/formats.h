// Weights in groups of inputs that share a scale: the packed layout of each kind, and rows of x in the same groups.
//
//     Q8_0   8.5 bits      w = d (q - 128)               groups of 32; q is the file's signed byte + 128
//     Q4_0   4.5 bits      w = d (q - 8)                 of 32
//     Q4_1   5 bits        w = d q + m                   of 32
//     Q4_K   4.625 bits    w = d s q + m t, 4-bit q      of 32; 8 groups share d and m
//     Q5_K   5.625 bits    w = d s q + m t, 5-bit q      of 32; 8 groups share d and m
//     Q6_K   6.5625 bits   w = d s (q - 32)              of 16; 16 groups share d
//     MXFP4  4.25 bits     w = d (q - 12) / 2            of 32; q is a table's entry for the file's code (E2M1)
//
// d and m are float16 numbers of a block of groups (d of MXFP4: a power of two in one byte, E8M0), s and t integers of a
// group in 8 bits, q unsigned. Q4_K and Q5_K have s and t of 6 bits in the file, which adds 1/8 bit here, and its m is
// -m. A packed weight has OUTPUTS outputs woven together:
//
//     packed [ceil(n / OUTPUTS)][blocks of k] of
//         d [OUTPUTS]; m [OUTPUTS]
//         groups of
//             s [OUTPUTS]; t [OUTPUTS]
//             the bits of q above its low 4, [2][WIDTH] words: those of byte j of quad i begin at bit 8 j + i (Q5_K) or
//             8 j + 2 i (Q6_K)
//             q [2][8][WIDTH][4] with Q8_0: quads of inputs
//               [2][QUADS][WIDTH][4]: quad i in the low halves of the bytes, quad i + QUADS in the high ones; of MXFP4
//               the codes
//
// A row of x is rounded in the same groups, x = e c with signed bytes c, so that a group's part of a result is
//
//     d s e (sum of q c - offset sum of c)  +  m t e (sum of c)
//
// The sum of q c is exact (dot.h).
#pragma once
#include "dot.h"

struct E8m0 {
    uint8_t bits;
};

// Half of powers of two 2^(bits - 127), because E2M1 has doubles. The one for 0 has no leading bit.
inline Vec load(const E8m0* p) {
    const IntVec e = __builtin_convertvector(load_int8(&p->bits), IntVec) & 0xff;
    return (Vec)(e << 23 | ((e == 0) & 0x400000)) * splat(0.5f);
}

// Twice the value of a code, plus 12. In each 16 bytes of a register.
#define E2M1_CODES 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
alignas(64) constexpr uint8_t E2M1[64] = {E2M1_CODES, E2M1_CODES, E2M1_CODES, E2M1_CODES};
#undef E2M1_CODES

inline IntVec decode_e2m1(IntVec codes) {
#if defined(__AVX512BW__)
    return (IntVec)_mm512_shuffle_epi8(_mm512_load_si512(E2M1), (__m512i)codes);
#elif defined(__AVX2__)
    return (IntVec)_mm256_shuffle_epi8(_mm256_load_si256((const __m256i*)E2M1), (__m256i)codes);
#else
    return (IntVec)vqtbl1q_u8(vld1q_u8(E2M1), (uint8x16_t)codes);
#endif
}

template <Kind KIND>
struct Format {
    using Scale = std::conditional_t<KIND == MXFP4, E8m0, Fp16>;
    static constexpr bool NIBBLES = KIND != Q8_0;
    static constexpr bool SUPER = KIND == Q4_K || KIND == Q5_K || KIND == Q6_K;
    static constexpr int GROUP = KIND == Q6_K ? 16 : 32;  // inputs
    static constexpr int GROUPS = SUPER ? 256 / GROUP : 1;  // of a block
    static constexpr int OFFSET = KIND == Q8_0 ? 128 : KIND == Q4_0 ? 8 : KIND == Q6_K ? 32 : KIND == MXFP4 ? 12 : 0;
    static constexpr int SCALES = KIND == Q4_1 || KIND == Q4_K || KIND == Q5_K ? 2 : 1;  // of an output: d, m
    static constexpr int FACTORS = SUPER ? SCALES : 0;                                   // of an output's group: s, t
    static constexpr int HIGH_BITS = KIND == Q5_K ? 1 : KIND == Q6_K ? 2 : 0;            // of q, above 4
    static constexpr int QUADS = NIBBLES ? GROUP / 8 : GROUP / 4;  // groups of 4 bytes of an output
    static constexpr int HIGH_AT = FACTORS * OUTPUTS, QUADS_AT = HIGH_AT + (HIGH_BITS ? 4 * OUTPUTS : 0);
    static constexpr int GROUP_BYTES = QUADS_AT + 4 * QUADS * OUTPUTS;
    static constexpr int HEAD_BYTES = sizeof(Scale) * SCALES * OUTPUTS;
    static constexpr int BYTES = HEAD_BYTES + GROUPS * GROUP_BYTES;  // of a block of OUTPUTS outputs
    static constexpr int FILE_BYTES = KIND == Q4_K ? 144 : KIND == Q5_K ? 176 : BYTES / OUTPUTS;
    static constexpr int INTS = GROUP / 4 + 3;  // of a row's rounded group
    static constexpr int ROW_INTS = GROUPS * INTS;
    static constexpr int BITS = !NIBBLES ? 8 : HIGH_BITS || KIND == MXFP4 ? 7 : 4;  // of q, at most
    static constexpr int MOST_ROWS = dot_rows<BITS>();
    static constexpr int ROWS = WIDTH == 16 ? MOST_ROWS / 2 : MOST_ROWS;  // of a tile
};

// use(an integral_constant of the kind)
template <class Use>
auto with_kind(int64_t kind, const Use& use) {
    if (kind == Q8_0) return use(std::integral_constant<Kind, Q8_0>());
    if (kind == Q4_0) return use(std::integral_constant<Kind, Q4_0>());
    if (kind == Q4_K) return use(std::integral_constant<Kind, Q4_K>());
    if (kind == Q5_K) return use(std::integral_constant<Kind, Q5_K>());
    if (kind == Q6_K) return use(std::integral_constant<Kind, Q6_K>());
    if (kind == MXFP4) return use(std::integral_constant<Kind, MXFP4>());
    return use(std::integral_constant<Kind, Q4_1>());
}

// q of half h of the outputs: quad i of a group at w, and, if there are two in a byte, quad i + QUADS.
template <Kind KIND>
inline void read_quads(const uint8_t* w, int i, int h, IntVec* low, IntVec* high) {
    using F = Format<KIND>;
    constexpr int HIGH_MASK = 0x01010101 * ((1 << F::HIGH_BITS) - 1);
    const IntVec q = load_ints(w + F::QUADS_AT + (h * F::QUADS + i) * WIDTH * 4);
    *low = F::NIBBLES ? q & 0x0f0f0f0f : q;
    *high = q >> 4 & 0x0f0f0f0f;
    if (KIND == MXFP4) {
        *low = decode_e2m1(*low);
        *high = decode_e2m1(*high);
    }
    if (!F::HIGH_BITS) return;
    const IntVec bits = load_ints(w + F::HIGH_AT + h * WIDTH * 4);
    *low |= (bits >> F::HIGH_BITS * i & HIGH_MASK) << 4;
    *high |= (bits >> F::HIGH_BITS * (i + F::QUADS) & HIGH_MASK) << 4;
}

// d s and m t of half h of the outputs, of the group at w in the block at head.
template <Kind KIND>
inline void read_scales(const uint8_t* head, const uint8_t* w, int h, Vec* d, Vec* m) {
    using F = Format<KIND>;
    const auto* scales = (const typename F::Scale*)head + h * WIDTH;
    *d = load(scales);
    *m = F::SCALES == 2 ? load(scales + OUTPUTS) : Vec{};
    if (F::FACTORS > 0) *d *= load_int8(w + h * WIDTH);
    if (F::FACTORS > 1) *m *= load_int8(w + OUTPUTS + h * WIDTH);
}

// GROUP numbers of x -> codes, e; returns the sum of c.
template <int GROUP>
float round_codes(const Element* x, uint8_t* codes, float* scale) {
    const float most = largest(x, GROUP);
    *scale = most / 127;
    return sum(round_numbers<GROUP>(x, inverse_step(most), codes));
}
