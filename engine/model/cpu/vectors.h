// Elements of the model's type in memory, float32 in registers of any level. ELEMENT is float, Bf16 or Fp16. Also:
// partial vectors at the ends of rows, activations, and the norm of a row.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "vec.h"

using Element = ELEMENT;

// The first `count` elements, at most WIDTH, padded with zeros.
inline Vec load_first(const Element* p, int64_t count) {
    if (count >= WIDTH) return load(p);
    Element part[WIDTH] = {};
    std::copy_n(p, count, part);
    return load(part);
}

template <class To>
inline void store_first(To* p, int64_t count, Vec v) {
    if (count >= WIDTH) return store(p, v);
    To part[WIDTH];
    store(part, v);
    std::copy_n(part, std::max<int64_t>(count, 0), p);
}

enum Activation : int32_t { SILU = 0, GELU_TANH = 1 };

// silu: x / (1 + e^-x)      gelu_tanh: the same with u = 2 sqrt(2 / pi) (x + 0.044715 x^3) in the exponent, because
// (1 + tanh(u / 2)) / 2 = 1 / (1 + e^-u).
template <Activation ACTIVATION>
inline Vec activate(Vec x) {
    constexpr float LOG2E = 1.44269504f, LINEAR = -1.5957691f * LOG2E;
    constexpr int DEGREE = std::is_same_v<Element, Bf16> ? 3 : 5;
    Vec t = x * splat(ACTIVATION == GELU_TANH ? 1 : -LOG2E);
    if (ACTIVATION == GELU_TANH) t = x * (x * x * splat(LINEAR * 0.044715f) + splat(LINEAR));
    return x / (splat(1) + exp2<DEGREE>(-maximum(-t, splat(-127))));
}

inline void norm_row(const Element* x, const Element* weight, float eps, int64_t width, Element* y) {
    Vec squares{};
    for (int64_t i = 0; i < width; i += WIDTH) {
        const Vec v = load_first(x + i, width - i);
        squares += v * v;
    }
    const Vec scale = splat(1.f / std::sqrt(sum(squares) / width + eps));
    for (int64_t i = 0; i < width; i += WIDTH) {
        const int64_t left = width - i;
        store_first(y + i, left, load_first(x + i, left) * scale * load_first(weight + i, left));
    }
}
