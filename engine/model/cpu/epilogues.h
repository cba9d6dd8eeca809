// Epilogues for a row of 32 products (gemm.h): bias, activation, addition, and the only rounding.
#pragma once
#include "gemm.h"

// Common to all epilogues: the bias, and the end of a row at n outputs.
struct Biased {
    const float* bias;  // padded to whole blocks, or null
    int64_t n;
    // use(first output, masks of the outputs that exist, the two halves of 32 outputs)
    template <class Use>
    void each(int64_t block, __m512 p, __m512 q, const Use& use) const {
        const int64_t at = block * 32;
        if (bias) {
            p = _mm512_add_ps(p, _mm512_loadu_ps(bias + at));
            q = _mm512_add_ps(q, _mm512_loadu_ps(bias + at + 16));
        }
        use(at, first(n - at), first(n - at - 16), p, q);
    }
};

struct ToBf16 {
    Biased from;
    bf16* y;
    int64_t stride;
    void operator()(int64_t row, int64_t block, __m512 c0, __m512 c1) const {
        from.each(block, c0, c1, [&](int64_t at, __mmask16 low, __mmask16 high, __m512 p, __m512 q) {
            store(y + row * stride + at, low, p);
            store(y + row * stride + at + 16, high, q);
        });
    }
};

struct ToFloat {
    Biased from;
    float* y;
    int64_t stride;
    void operator()(int64_t row, int64_t block, __m512 c0, __m512 c1) const {
        from.each(block, c0, c1, [&](int64_t at, __mmask16 low, __mmask16 high, __m512 p, __m512 q) {
            _mm512_mask_storeu_ps(y + row * stride + at, low, p);
            _mm512_mask_storeu_ps(y + row * stride + at + 16, high, q);
        });
    }
};

struct AddTo {  // x + product, in place
    Biased from;
    bf16* x;
    int64_t stride;
    void operator()(int64_t row, int64_t block, __m512 c0, __m512 c1) const {
        from.each(block, c0, c1, [&](int64_t at, __mmask16 low, __mmask16 high, __m512 p, __m512 q) {
            bf16* to = x + row * stride + at;
            store(to, low, _mm512_add_ps(load(to, low), p));
            store(to + 16, high, _mm512_add_ps(load(to + 16, high), q));
        });
    }
};

template <Activation ACTIVATION>
struct ActMul {  // for a gated weight: outputs 0-15 of a block are gates, 16-31 their ups; from.n is the padded width
    Biased from;
    bf16* y;
    int64_t width;
    void operator()(int64_t row, int64_t block, __m512 c0, __m512 c1) const {
        from.each(block, c0, c1, [&](int64_t at, __mmask16, __mmask16, __m512 gate, __m512 up) {
            store(y + row * width + at / 2, first(width - block * 16), _mm512_mul_ps(activate<ACTIVATION>(gate), up));
        });
    }
};
