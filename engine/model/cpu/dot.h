// Exact sums of products of bytes: rows of x as signed bytes c, x = e c with e = max |x| / 127; weights are unsigned.
//
// Where the CPU multiplies quads of bytes (vpdpbusd) the sum is made in int32. With AVX2 and AVX-512 alone it is made in
// int16 (vpmaddubsw): 16 products of 4 and 8 bits stay below 2^15, and weights of more bits are two halves.
#pragma once
#include "gemm_any.h"

inline IntVec load_ints(const uint8_t* p) {
    IntVec v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline Vec magnitude(Vec v) { return (Vec)((IntVec)v & INT32_MAX); }

// The largest |x|; count is a multiple of 16.
inline float largest(const Element* x, int64_t count) {
    Vec most{};
    for (int64_t i = 0; i < count; i += WIDTH) most = maximum(most, magnitude(load(x + i)));
    return maximum(most);
}

// 1 / e of numbers up to `most`; 0 if e is too small to divide by.
inline Vec inverse_step(float most) {
    constexpr float LEAST = 1e-30f;
    return splat(most > LEAST ? 127 / most : 0);
}

// COUNT numbers -> codes; returns their sum, lane by lane.
template <int COUNT>
Vec round_numbers(const Element* x, Vec inverse, uint8_t* codes) {
    constexpr float TO_INTEGER = 12582912;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
    Vec total{};
    for (int i = 0; i < COUNT; i += WIDTH) {
        const Vec moved = load(x + i) * inverse + splat(TO_INTEGER);
        store_bytes(codes + i, (IntVec)moved);
        total += moved - splat(TO_INTEGER);
    }
    return total;
}

// Sums, lane by lane, of quads of unsigned bytes times quads of signed ones. HALVES: the unsigned ones are below 16.
// DOT_QUADS: the most quads of one sum.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
constexpr int64_t DOT_QUADS = INT32_MAX;
template <bool HALVES>
struct Dot {
    IntVec sum{};
    void add(IntVec w, IntVec x) { sum = (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
    IntVec get() const { return sum; }
};
#elif defined(__AVX512BW__) || defined(__AVX2__)
constexpr int64_t DOT_QUADS = 8;
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
constexpr int64_t DOT_QUADS = INT32_MAX;
template <bool HALVES>
struct Dot {
    IntVec sum{};
    void add(IntVec w, IntVec x) {
        for (int byte = 0; byte < 4; byte++) sum += (w >> 8 * byte & 0xff) * (x << (24 - 8 * byte) >> 24);
    }
    IntVec get() const { return sum; }
};
#endif

// Rows of a tile: their integer sums stay in registers.
template <bool HALVES>
constexpr int dot_rows() {
#if defined(__AVX512VNNI__)
    return 12;
#elif defined(__AVX512F__)
    return HALVES ? 12 : 6;
#elif defined(__AVX2__)
    return HALVES ? 4 : 2;
#else
    return 4;
#endif
}

// Sizes of tiles: fewer than all, because each is compiled for every kind.
constexpr int smaller(int count) { return count > 8 ? 8 : count > 6 ? 6 : count > 4 ? 4 : count - 1; }

inline int64_t tile_rows(int most, int64_t rows) {
    while (most > rows) most = smaller(most);
    return most;
}
