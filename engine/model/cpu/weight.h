// A packed weight, and the epilogues of products with it: bias, activation, addition, and the only rounding.
//
// The header of the products defines, before it includes this one, STEP, the number of which its inputs are a multiple.
#pragma once
#include "vectors.h"

constexpr int OUTPUTS = 2 * WIDTH;  // of a packed block

// What a packed weight consists of: elements, or groups of inputs that share a scale (groups.h), or several weights of
// such groups one below the other, or bytes with float32 scales (bytes.h).
enum Kind : int64_t {
    ELEMENTS = 0,
    Q8_0 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q4_K = 4,
    Q5_K = 5,
    Q6_K = 6,
    MIXED = 7,
    S8 = 8,
    E4M3 = 9,
    MXFP4 = 10,
};

struct Weight {
    const Element* packed;
    const float* bias;  // padded to whole blocks, or null
    int64_t n, k, kind;
    int64_t blocks() const { return (n + OUTPUTS - 1) / OUTPUTS; }
    int64_t steps() const { return (k + STEP - 1) / STEP; }
    const Element* block(int64_t b) const { return packed + b * steps() * STEP * OUTPUTS; }
};

// An epilogue is called with a row, a block, and the two halves of the block's OUTPUTS sums.
struct Biased {
    const float* bias;  // padded to whole blocks, or null
    int64_t n;
    // use(first output, number of outputs left, sums) for each half
    template <class Use>
    void each(int64_t block, Vec low, Vec high, const Use& use) const {
        const int64_t at = block * OUTPUTS;
        use(at, n - at, bias ? low + load(bias + at) : low);
        use(at + WIDTH, n - at - WIDTH, bias ? high + load(bias + at + WIDTH) : high);
    }
};

template <class To>
struct StoreTo {
    Biased from;
    To* y;
    int64_t stride;
    void operator()(int64_t row, int64_t block, Vec low, Vec high) const {
        from.each(block, low, high,
                  [&](int64_t at, int64_t left, Vec v) { store_first(y + row * stride + at, left, v); });
    }
};

struct AddTo {  // x + product, in place
    Biased from;
    Element* x;
    int64_t stride;
    void operator()(int64_t row, int64_t block, Vec low, Vec high) const {
        from.each(block, low, high, [&](int64_t at, int64_t left, Vec v) {
            if (left <= 0) return;
            Element* to = x + row * stride + at;
            store_first(to, left, load_first(to, left) + v);
        });
    }
};

template <Activation ACTIVATION>
struct ActMul {  // for a gated weight without a bias: the first half of a block are gates, the second their ups
    Element* y;
    int64_t width;
    void operator()(int64_t row, int64_t block, Vec gate, Vec up) const {
        store_first(y + row * width + block * WIDTH, width - block * WIDTH, activate<ACTIVATION>(gate) * up);
    }
};
