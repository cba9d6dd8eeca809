// bfloat16 in memory, float32 in registers: loads, stores, activations and the norm of a row.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>

using bf16 = uint16_t;

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m512 load(const bf16* x, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, x)); }
inline void store(bf16* y, __mmask16 mask, __m512 x) {
    _mm256_mask_storeu_epi16(y, mask, (__m256i)_mm512_cvtneps_pbh(x));
}
inline __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

// 2^t; 0 below and infinity above the exponents of float. Relative error 1e-4; bfloat16 resolves 4e-3.
inline __m512 exp2(__m512 t) {
    const __m512 fraction = _mm512_reduce_ps(t, 0x09);  // t - floor(t)
    __m512 p = _mm512_set1_ps(0.07802452f);
    for (float coefficient : {0.22606716f, 0.69583356f, 0.99992520f})
        p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(coefficient));
    return _mm512_scalef_ps(p, t);
}

// silu: x / (1 + e^-x)      gelu_tanh: the same with u = 2 sqrt(2 / pi) (x + 0.044715 x^3) in the exponent, because
// (1 + tanh(u / 2)) / 2 = 1 / (1 + e^-u). The quotient is accurate to 14 bits.
enum Activation : int32_t { SILU = 0, GELU_TANH = 1 };

template <Activation ACTIVATION>
inline __m512 activate(__m512 x) {
    constexpr float LOG2E = 1.44269504f, LINEAR = -1.5957691f * LOG2E;
    __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(-LOG2E));
    if (ACTIVATION == GELU_TANH) {
        const __m512 slope = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(LINEAR * 0.044715f), _mm512_set1_ps(LINEAR));
        t = _mm512_mul_ps(x, slope);
    }
    return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.f), exp2(t))));
}

inline void norm_row(const bf16* x, const bf16* weight, float eps, int64_t width, bf16* y) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
        const __m512 v = load(x + i, first(width - i));
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(sum) / width + eps));
    for (int64_t i = 0; i < width; i += 16) {
        const __mmask16 mask = first(width - i);
        store(y + i, mask, _mm512_mul_ps(_mm512_mul_ps(load(x + i, mask), scale), load(weight + i, mask)));
    }
}
