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

// e^x for x clamped to [-87, 88], relative error 2e-7: 2^n 2^f with a polynomial for 2^f, |f| <= 1/2.
inline __m512 exp16(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.f)), _mm512_set1_ps(88.f));
    const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), n = _mm512_roundscale_ps(t, 0);
    const __m512 f = _mm512_sub_ps(t, n);
    __m512 p = _mm512_set1_ps(1.5353362e-4f);
    for (float coefficient : {1.3398874e-3f, 9.6184373e-3f, 5.5503324e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(coefficient));
    return _mm512_scalef_ps(p, n);
}

// silu: x / (1 + e^-x)      gelu_tanh: the same with u = 2 sqrt(2 / pi) (x + 0.044715 x^3) in the exponent, because
// (1 + tanh(u / 2)) / 2 = 1 / (1 + e^-u). The quotient is an estimate of 14 bits and one Newton step.
enum Activation : int32_t { SILU = 0, GELU_TANH = 1 };

template <Activation ACTIVATION>
inline __m512 activate(__m512 x) {
    __m512 u = x;
    if (ACTIVATION == GELU_TANH) {
        const __m512 cubic = _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(1.5957691f * 0.044715f));
        u = _mm512_mul_ps(x, _mm512_add_ps(cubic, _mm512_set1_ps(1.5957691f)));
    }
    const __m512 d = _mm512_add_ps(_mm512_set1_ps(1.f), exp16(_mm512_sub_ps(_mm512_setzero_ps(), u)));
    const __m512 r = _mm512_rcp14_ps(d);
    return _mm512_mul_ps(x, _mm512_mul_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(2.f))));
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
