// The operations of engine/model/ops/cpu.py, over products and packed weights. The header included before this one
// defines both: gemm_amx.h, groups.h or bytes.h.
//
// Few rows (decode): threads share the outputs of a product, so that each reads its part of the weights once, and wait
// at a barrier between products. Many rows (prefill): threads share the rows and compute a whole layer for them without
// barriers, in pieces whose activations stay in the L2 cache.
#pragma once

namespace {

constexpr int64_t SHARE_ROWS_FROM = 192;  // rows from which threads share rows instead of outputs
constexpr int64_t PIECE_ROWS = 8 * ROWS;  // rows that pass a layer together
constexpr int64_t SHARE_ELEMENTS_FROM = 1 << 15;  // smaller elementwise operations run on one thread

inline int elementwise_threads(int64_t elements, int threads) { return elements < SHARE_ELEMENTS_FROM ? 1 : threads; }

// Calls body for pieces of `rows`, each of at most PIECE_ROWS.
template <class Body>
void pieces(Range rows, const Body& body) {
    for (int64_t at = rows.begin; at < rows.end; at += PIECE_ROWS) body(Range{at, std::min(at + PIECE_ROWS, rows.end)});
}

// Whole product of x [m, k]: threads share outputs or rows.
template <class Epilogue>
void shared_product(const Weight& w, const Element* x, int64_t stride, int64_t m, int threads, const Epilogue& epilogue) {
    team(threads, [&](int index, int count) {
        const bool by_rows = m >= SHARE_ROWS_FROM;
        const Range rows = by_rows ? share(m, ROWS, index, count) : Range{0, m};
        const Range blocks = by_rows ? Range{0, w.blocks()} : share(w.blocks(), 1, index, count);
        pieces(rows, [&](Range piece) { product(x, stride, piece, w, blocks, epilogue); });
    });
}

template <Activation ACTIVATION>
void act_mul_rows(const Element* gate_up, int64_t m, int64_t width, Element* y, int threads) {
    team(elementwise_threads(m * width, threads), [&](int index, int count) {
        const Range rows = share(m, 1, index, count);
        for (int64_t i = rows.begin; i < rows.end; i++)
            for (int64_t j = 0; j < width; j += WIDTH) {
                const Element* gate = gate_up + 2 * i * width + j;
                const Vec up = load_first(gate + width, width - j);
                store_first(y + i * width + j, width - j, activate<ACTIVATION>(load_first(gate, width - j)) * up);
            }
    });
}

}  // namespace

extern "C" {

// Outputs of a packed block, and the number of which its inputs are a multiple.
int32_t block_outputs() { return OUTPUTS; }
int32_t block_inputs() { return STEP; }

// weight [n, k] (contiguous) -> packed. gated: the halves of n are interleaved, WIDTH gates and then their ups.
void pack(const Element* weight, int64_t n, int64_t k, int32_t gated, Element* packed, int32_t threads) {
    const Weight w{packed, nullptr, gated ? (n / 2 + WIDTH - 1) / WIDTH * OUTPUTS : n, k};
    team(threads, [&](int index, int count) {
        const Range blocks = share(w.blocks(), 1, index, count);
        for (int64_t output = blocks.begin * OUTPUTS; output < blocks.end * OUTPUTS; output++) {
            const int64_t column = gated ? output / OUTPUTS * WIDTH + output % WIDTH : output;
            const int64_t row = gated && output % OUTPUTS >= WIDTH ? n / 2 + column : column;
            const bool inside = column < (gated ? n / 2 : n);
            for (int64_t i = 0; i < w.steps() * STEP; i++)
                packed[packed_at(w, output, i)] = inside && i < k ? weight[row * k + i] : Element{};
        }
    });
}

// Rows ids[m] of a packed weight, not gated -> y [m, k]. Returns 0, or 1 if an id is out of range: y is incomplete.
int32_t rows_of(const Weight* w, const int64_t* ids, int64_t m, Element* y, int32_t threads) {
    for (int64_t i = 0; i < m; i++)
        if (ids[i] < 0 || ids[i] >= w->n) return 1;
    team(elementwise_threads(m * w->k, threads), [&](int index, int count) {
        const Range mine = share(m, 1, index, count);
        for (int64_t i = mine.begin; i < mine.end; i++) read_output(*w, ids[i], y + i * w->k);
    });
    return 0;
}

// x [m, k] with row stride `stride` -> y [m, n] of x's type, or float32 if `wide`. k is padded to whole steps.
void linear(const Weight* w, const Element* x, int64_t stride, int64_t m, void* y, int32_t wide, int32_t threads) {
    const Biased from{w->bias, w->n};
    if (wide)
        shared_product(*w, x, stride, m, threads, StoreTo<float>{from, static_cast<float*>(y), w->n});
    else
        shared_product(*w, x, stride, m, threads, StoreTo<Element>{from, static_cast<Element*>(y), w->n});
}

// act(gate) * up of a gated weight -> y [m, width].
void gated_linear(const Weight* w, const Element* x, int64_t stride, int64_t m, Element* y, int64_t width,
                  Activation activation, int32_t threads) {
    if (activation == SILU)
        shared_product(*w, x, stride, m, threads, ActMul<SILU>{y, width});
    else
        shared_product(*w, x, stride, m, threads, ActMul<GELU_TANH>{y, width});
}

// y = weight * x / sqrt(mean(x^2) + eps); with delta, x += delta first. x, delta, y [m, width].
void rms_norm(Element* x, int64_t stride, const Element* delta, const Element* weight, float eps, int64_t m,
              int64_t width, Element* y, int32_t threads) {
    team(elementwise_threads(m * width, threads), [&](int index, int count) {
        const Range rows = share(m, 1, index, count);
        for (int64_t i = rows.begin; i < rows.end; i++) {
            Element* row = x + i * stride;
            if (delta)
                for (int64_t j = 0; j < width; j += WIDTH) {
                    const int64_t left = width - j;
                    store_first(row + j, left, load_first(row + j, left) + load_first(delta + i * width + j, left));
                }
            norm_row(row, weight, eps, width, y + i * width);
        }
    });
}

// act(gate) * up for gate_up [m, 2 width] -> y [m, width].
void act_mul(const Element* gate_up, int64_t m, int64_t width, Element* y, Activation activation, int32_t threads) {
    activation == SILU ? act_mul_rows<SILU>(gate_up, m, width, y, threads)
                       : act_mul_rows<GELU_TANH>(gate_up, m, width, y, threads);
}

// The part of a layer after attention. All widths are multiples of STEP.
struct Tail {
    Weight o, gate_up, down;
    const Element *norm, *next_norm;
    float eps;
    Activation activation;
    Weight next;  // the first product of the next layer; packed is null after the last layer
};

//     x += o(attended)      x += down(act(gate) * up), gate and up of norm(x)      normed = next_norm(x)
//     y = next(normed)
// attended [m, o.k], x and normed [m, o.n], y [m, next.n] or null.
void tail(const Tail* t, const Element* attended, Element* x, Element* normed, Element* y, int64_t m, int32_t threads) {
    const int64_t hidden = t->o.n, inner = t->down.k;
    static thread_local Scratch<Element> shared_scratch;
    const bool by_rows = m >= SHARE_ROWS_FROM;
    Element* shared = by_rows ? nullptr : shared_scratch.get(m * inner);
    Barrier barrier;
    // Rows [rows] by one thread that computes share `index` of `parts` of each product and of the norms.
    const auto layer = [&](Range rows, int index, int parts, Element* gated) {
        const auto norm = [&](const Element* weight) {
            const Range mine = share(rows.size(), 1, index, parts);
            for (int64_t i = rows.begin + mine.begin; i < rows.begin + mine.end; i++)
                norm_row(x + i * hidden, weight, t->eps, hidden, normed + i * hidden);
        };
        const auto times = [&](const Element* from, const Weight& w, const auto& epilogue) {
            pieces(rows, [&](Range piece) { product(from, w.k, piece, w, share(w.blocks(), 1, index, parts), epilogue); });
        };
        times(attended, t->o, AddTo{{t->o.bias, hidden}, x, hidden});
        barrier.wait(parts);
        norm(t->norm);
        barrier.wait(parts);
        Element* to = gated - rows.begin * inner;
        if (t->activation == SILU)
            times(normed, t->gate_up, ActMul<SILU>{to, inner});
        else
            times(normed, t->gate_up, ActMul<GELU_TANH>{to, inner});
        barrier.wait(parts);
        times(to, t->down, AddTo{{t->down.bias, hidden}, x, hidden});
        barrier.wait(parts);
        norm(t->next_norm);
        if (!t->next.packed) return;
        barrier.wait(parts);
        times(normed, t->next, StoreTo<Element>{{t->next.bias, t->next.n}, y, t->next.n});
    };
    team(threads, [&](int index, int count) {
        if (!by_rows) return layer({0, m}, index, count, shared);
        static thread_local Scratch<Element> own;
        pieces(share(m, ROWS, index, count), [&](Range piece) { layer(piece, 0, 1, own.get(PIECE_ROWS * inner)); });
    });
}

// The arguments of `tail` in one struct.
struct TailCall {
    const Tail* layer;
    const Element* attended;
    Element *x, *normed, *y;
    int64_t m;
    int32_t threads;
};

void tail_call(const TailCall* c) { tail(c->layer, c->attended, c->x, c->normed, c->y, c->m, c->threads); }

struct Call {
    void (*function)(const void*);
    const void* argument;
};

// Runs calls in order, of this library and of others (layers_cpu.py), until another thread sets *stop, if it is not
// null. Returns whether all have run.
int32_t run_calls(const Call* calls, int64_t count, const int32_t* stop) {
    for (int64_t i = 0; i < count; i++) {
        if (stop && __atomic_load_n(stop, __ATOMIC_RELAXED)) return 0;
        calls[i].function(calls[i].argument);
    }
    return 1;
}

}  // extern "C"
