// The operations of engine/model/ops_cpu.py: products on AMX tiles (gemm.h), with the following operations in the same
// pass.
//
// Few rows (decode): threads share the outputs of a product, so that each reads its part of the weights once, and wait
// at a barrier between products. Many rows (prefill): threads share the rows and compute a whole layer for them without
// barriers, in pieces whose activations stay in the L2 cache.
#include <sys/syscall.h>
#include <unistd.h>

#include "epilogues.h"

namespace {

constexpr int64_t SHARE_ROWS_FROM = 192;  // rows from which threads share rows instead of outputs
constexpr int64_t PIECE_ROWS = 256;       // rows that pass a layer together
constexpr int64_t SHARE_ELEMENTS_FROM = 1 << 15;  // smaller elementwise operations run on one thread

inline int elementwise_threads(int64_t elements, int threads) { return elements < SHARE_ELEMENTS_FROM ? 1 : threads; }

template <Activation ACTIVATION>
void act_mul_rows(const bf16* gate_up, int64_t m, int64_t width, bf16* y, int threads) {
    team(elementwise_threads(m * width, threads), [&](int index, int count) {
        const Range rows = share(m, 1, index, count);
        for (int64_t i = rows.begin; i < rows.end; i++)
            for (int64_t j = 0; j < width; j += 16) {
                const __mmask16 mask = first(width - j);
                const bf16* gate = gate_up + 2 * i * width + j;
                const __m512 up = load(gate + width, mask);
                store(y + i * width + j, mask, _mm512_mul_ps(activate<ACTIVATION>(load(gate, mask)), up));
            }
    });
}

// Whole product of x [m, k]: threads share outputs or rows.
template <class Epilogue>
void shared_product(const Weight& w, const bf16* x, int64_t stride, int64_t m, int threads, const Epilogue& epilogue) {
    team(threads, [&](int index, int count) {
        if (m < SHARE_ROWS_FROM) return product(x, stride, {0, m}, w, share(w.blocks(), 1, index, count), epilogue);
        const Range rows = share(m, 32, index, count);
        for (int64_t at = rows.begin; at < rows.end; at += PIECE_ROWS)
            product(x, stride, {at, std::min(at + PIECE_ROWS, rows.end)}, w, {0, w.blocks()}, epilogue);
    });
}

}  // namespace

extern "C" {

// Outputs of a packed block, and the number of which its inputs are a multiple.
int32_t block_outputs() { return 32; }
int32_t block_inputs() { return 32; }

// Requests the kernel's permission to use the tiles; 0: granted. Once per process.
int32_t amx_request() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */); }

// weight [n, k] (contiguous) -> packed. gated: the halves of n are interleaved, 16 gates and then their 16 ups.
void pack(const bf16* weight, int64_t n, int64_t k, int32_t gated, bf16* packed, int32_t threads) {
    const Weight w{nullptr, nullptr, gated ? (n / 2 + 15) / 16 * 32 : n, k};
    team(threads, [&](int index, int count) {
        const Range blocks = share(w.blocks(), 1, index, count);
        for (int64_t b = blocks.begin; b < blocks.end; b++)
            for (int64_t s = 0; s < w.steps(); s++)
                for (int half = 0; half < 2; half++) {
                    bf16* tile = packed + (b * w.steps() + s) * 1024 + half * 512;
                    for (int64_t j = 0; j < 16; j++) {
                        const int64_t column = gated ? b * 16 + j : b * 32 + half * 16 + j;
                        const int64_t row = gated && half ? n / 2 + column : column;
                        const bool inside = column < (gated ? n / 2 : n);
                        for (int64_t i = 0; i < 32; i++)
                            tile[i / 2 * 32 + j * 2 + i % 2] =
                                inside && s * 32 + i < k ? weight[row * k + s * 32 + i] : 0;
                    }
                }
    });
}

// Rows ids[m] of a packed weight, not gated -> y [m, k]. Returns 0, or 1 if an id is out of range: y is incomplete.
int32_t rows_of(const Weight* w, const int64_t* ids, int64_t m, bf16* y, int32_t threads) {
    for (int64_t i = 0; i < m; i++)
        if (ids[i] < 0 || ids[i] >= w->n) return 1;
    const __m512i lane = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                            _mm512_set1_epi32(64));
    team(elementwise_threads(m * w->k, threads), [&](int index, int count) {
        const Range mine = share(m, 1, index, count);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            const int64_t id = ids[i];
            const bf16* from = w->packed + id / 32 * w->steps() * 1024 + id % 32 / 16 * 512 + id % 16 * 2;
            for (int64_t s = 0; s < w->steps(); s++) {
                const int64_t left = w->k - s * 32;
                const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
                _mm512_mask_storeu_epi16(y + i * w->k + s * 32, mask, _mm512_i32gather_epi32(lane, from + s * 1024, 1));
            }
        }
    });
    return 0;
}

// x [m, k] with row stride `stride` -> y [m, n] bfloat16, or float32 if `wide`. x is padded to a multiple of 32 inputs.
void linear(const Weight* w, const bf16* x, int64_t stride, int64_t m, void* y, int32_t wide, int32_t threads) {
    const Biased from{w->bias, w->n};
    if (wide)
        shared_product(*w, x, stride, m, threads, ToFloat{from, static_cast<float*>(y), w->n});
    else
        shared_product(*w, x, stride, m, threads, ToBf16{from, static_cast<bf16*>(y), w->n});
}

// act(gate) * up of a gated weight -> y [m, width].
void gated_linear(const Weight* w, const bf16* x, int64_t stride, int64_t m, bf16* y, int64_t width,
                  Activation activation, int32_t threads) {
    if (activation == SILU)
        shared_product(*w, x, stride, m, threads, ActMul<SILU>{{w->bias, w->n}, y, width});
    else
        shared_product(*w, x, stride, m, threads, ActMul<GELU_TANH>{{w->bias, w->n}, y, width});
}

// y = weight * x / sqrt(mean(x^2) + eps); with delta, x += delta first. x, delta, y [m, width].
void rms_norm(bf16* x, int64_t stride, const bf16* delta, const bf16* weight, float eps, int64_t m, int64_t width,
              bf16* y, int32_t threads) {
    team(elementwise_threads(m * width, threads), [&](int index, int count) {
        const Range rows = share(m, 1, index, count);
        for (int64_t i = rows.begin; i < rows.end; i++) {
            bf16* row = x + i * stride;
            if (delta)
                for (int64_t j = 0; j < width; j += 16) {
                    const __mmask16 mask = first(width - j);
                    store(row + j, mask, _mm512_add_ps(load(row + j, mask), load(delta + i * width + j, mask)));
                }
            norm_row(row, weight, eps, width, y + i * width);
        }
    });
}

// act(gate) * up for gate_up [m, 2 width] -> y [m, width].
void act_mul(const bf16* gate_up, int64_t m, int64_t width, bf16* y, Activation activation, int32_t threads) {
    activation == SILU ? act_mul_rows<SILU>(gate_up, m, width, y, threads)
                       : act_mul_rows<GELU_TANH>(gate_up, m, width, y, threads);
}

// The part of a layer after attention. All widths are multiples of 32.
struct Tail {
    Weight o, gate_up, down;
    const bf16 *norm, *next_norm;
    float eps;
    Activation activation;
    Weight next;  // the first product of the next layer; packed is null after the last layer
};

//     x += o(attended)      x += down(act(gate) * up), gate and up of norm(x)      normed = next_norm(x)
//     y = next(normed)
// attended [m, o.k], x and normed [m, o.n], y [m, next.n] or null.
void tail(const Tail* t, const bf16* attended, bf16* x, bf16* normed, bf16* y, int64_t m, int32_t threads) {
    const int64_t hidden = t->o.n, inner = t->down.k;
    static thread_local Scratch<bf16> shared_scratch;
    const bool by_rows = m >= SHARE_ROWS_FROM;
    bf16* shared = by_rows ? nullptr : shared_scratch.get(m * inner);
    Barrier barrier;
    // Rows [rows] by one thread that computes share `index` of `parts` of each product and of the norms.
    const auto layer = [&](Range rows, int index, int parts, bf16* gated) {
        const auto norm = [&](const bf16* weight) {
            const Range mine = share(rows.size(), 1, index, parts);
            for (int64_t i = rows.begin + mine.begin; i < rows.begin + mine.end; i++)
                norm_row(x + i * hidden, weight, t->eps, hidden, normed + i * hidden);
        };
        const auto blocks = [&](const Weight& w) { return share(w.blocks(), 1, index, parts); };
        product(attended, t->o.k, rows, t->o, blocks(t->o), AddTo{{t->o.bias, hidden}, x, hidden});
        barrier.wait(parts);
        norm(t->norm);
        barrier.wait(parts);
        const Biased gates{t->gate_up.bias, t->gate_up.n};
        bf16* to = gated - rows.begin * inner;
        if (t->activation == SILU)
            product(normed, hidden, rows, t->gate_up, blocks(t->gate_up), ActMul<SILU>{gates, to, inner});
        else
            product(normed, hidden, rows, t->gate_up, blocks(t->gate_up), ActMul<GELU_TANH>{gates, to, inner});
        barrier.wait(parts);
        product(to, inner, rows, t->down, blocks(t->down), AddTo{{t->down.bias, hidden}, x, hidden});
        barrier.wait(parts);
        norm(t->next_norm);
        if (!t->next.packed) return;
        barrier.wait(parts);
        product(normed, hidden, rows, t->next, blocks(t->next), ToBf16{{t->next.bias, t->next.n}, y, t->next.n});
    };
    team(threads, [&](int index, int count) {
        if (!by_rows) return layer({0, m}, index, count, shared);
        static thread_local Scratch<bf16> own;
        const Range rows = share(m, 32, index, count);
        for (int64_t at = rows.begin; at < rows.end; at += PIECE_ROWS)
            layer({at, std::min(at + PIECE_ROWS, rows.end)}, 0, 1, own.get(PIECE_ROWS * inner));
    });
}

// The arguments of `tail` in one struct.
struct TailCall {
    const Tail* layer;
    const bf16* attended;
    bf16 *x, *normed, *y;
    int64_t m;
    int32_t threads;
};

void tail_call(const TailCall* c) { tail(c->layer, c->attended, c->x, c->normed, c->y, c->m, c->threads); }

struct Call {
    void (*function)(const void*);
    const void* argument;
};

// Runs calls in order, of this library and of others (layers_cpu.py).
void run_calls(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].function(calls[i].argument);
}

}  // extern "C"
