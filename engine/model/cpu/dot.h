// Exact sums of products of bytes: rows of x as signed bytes c, x = e c with e = max |x| / 127; weights are unsigned.
//
// Where the CPU multiplies quads of bytes (vpdpbusd, sdot) the sum is made in int32. With AVX2 and AVX-512 alone it is made
// in int16 (vpmaddubsw): 16 products of 4 and 8 bits stay below 2^15, and weights of more bits are two halves. ARM has
// products of two signed bytes: weights of 8 bits are moved by 128.
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

// Sums, lane by lane, of quads of unsigned bytes of BITS bits (4, 7 or 8) times quads of signed ones. The sum is that of
// (w - MOVED) x. DOT_QUADS: the most quads of one sum.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
constexpr int64_t DOT_QUADS = INT32_MAX;
template <int BITS>
struct Dot {
    static constexpr int MOVED = 0;
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
template <int BITS>
struct Dot {
    static constexpr int MOVED = 0;
    static constexpr bool HALVES = BITS == 4;
    Shorts low{}, high{};
    void add(IntVec w, IntVec x) {
        low += pairs(HALVES ? w : w & 0x0f0f0f0f, x);
        if (!HALVES) high += pairs(w >> 4 & 0x0f0f0f0f, x);
    }
    IntVec get() const { return HALVES ? both(low, 1) : both(low, 1) + both(high, 16); }
};
#else
constexpr int64_t DOT_QUADS = INT32_MAX;
template <int BITS>
struct Dot {
    static constexpr int MOVED = BITS == 8 ? 128 : 0;
    static int8x16_t moved(IntVec w) { return (int8x16_t)(MOVED ? w ^ (int32_t)0x80808080 : w); }
#if defined(__ARM_FEATURE_DOTPROD)
    int32x4_t sum{};
    void add(IntVec w, IntVec x) { sum = vdotq_s32(sum, moved(w), (int8x16_t)x); }
    IntVec get() const { return (IntVec)sum; }
#else
    int32x4_t low{}, high{};  // pairs of products of the first and the last two quads
    void add(IntVec w, IntVec x) {
        const int8x16_t codes = (int8x16_t)x;  // -127 to 127, so that a product fits 16 bits
        low = vpadalq_s16(low, vmull_s8(vget_low_s8(moved(w)), vget_low_s8(codes)));
        high = vpadalq_s16(high, vmull_high_s8(moved(w), codes));
    }
    IntVec get() const { return (IntVec)vpaddq_s32(low, high); }
#endif
};
#endif

// Rows of a tile: their integer sums stay in registers.
template <int BITS>
constexpr int dot_rows() {
#if defined(__AVX512VNNI__)
    return 12;
#elif defined(__AVX512F__)
    return BITS == 4 ? 12 : 6;
#elif defined(__AVX2__)
    return BITS == 4 ? 4 : 2;
#elif defined(__ARM_FEATURE_DOTPROD)
    return 8;
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
