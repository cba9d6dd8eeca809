// The operations of engine/ops_cpu.py: products on AMX tiles (cpu_gemm.h) with what follows them in the same pass.
//
// Few rows (decode): threads share the outputs of a product, so that each reads its part of the weights once, and meet
// at a barrier between products. Many rows (prefill): threads share the rows, and take them through a whole layer in
// pieces whose activations stay in the L2 cache, without meeting.
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "cpu_gemm.h"

namespace {

constexpr int64_t SHARE_ROWS_FROM = 192;  // rows from which threads share rows instead of outputs
constexpr int64_t PIECE_ROWS = 256;       // rows that go through a layer together
constexpr int64_t SMALL = 1 << 15;        // elements below which an elementwise operation stays on one thread

// --- vectors

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

// --- threads

// Where the threads of one parallel region wait for each other: spinning, because the wait is about a microsecond, and
// giving the core away when it is not.
class Barrier {
  public:
    void wait(int threads) {
        if (threads == 1) return;
        const int round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++)
            if (spins < 2000)
                _mm_pause();
            else
                sched_yield();
    }

  private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
};

// Memory of one thread that grows and is used again.
class Scratch {
  public:
    ~Scratch() { std::free(memory_); }
    bf16* get(int64_t elements) {
        if (elements > size_) {
            std::free(memory_);
            size_ = (elements + 31) / 32 * 32;
            memory_ = static_cast<bf16*>(std::aligned_alloc(64, size_ * sizeof(bf16)));
        }
        return memory_;
    }

  private:
    bf16* memory_ = nullptr;
    int64_t size_ = 0;
};

// body(index, threads) on each thread of a team.
template <class Body>
void team(int threads, const Body& body) {
    if (threads <= 1) return body(0, 1);
#pragma omp parallel num_threads(threads)
    body(omp_get_thread_num(), omp_get_num_threads());
}

// --- epilogues: what becomes of 32 x 32 products

// What all have in common: the bias and the end of a row at n outputs.
struct Biased {
    const float* bias;  // padded to whole blocks, or null
    int64_t n;
    // use(row, output, masks of the outputs that exist, the two halves of 32 outputs)
    template <class Use>
    void each(int64_t row, int64_t count, int64_t block, const Products& c, const Use& use) const {
        const int64_t at = block * 32;
        const __m512 zero = _mm512_setzero_ps();
        const __m512 b0 = bias ? _mm512_loadu_ps(bias + at) : zero, b1 = bias ? _mm512_loadu_ps(bias + at + 16) : zero;
        for (int64_t i = 0; i < count; i++)
            use(row + i, at, first(n - at), first(n - at - 16), _mm512_add_ps(c.row(i, 0), b0),
                _mm512_add_ps(c.row(i, 1), b1));
    }
};

struct ToBf16 {
    Biased from;
    bf16* y;
    int64_t stride;
    void operator()(int64_t row, int64_t count, int64_t block, const Products& c) const {
        from.each(row, count, block, c, [&](int64_t i, int64_t at, __mmask16 low, __mmask16 high, __m512 p, __m512 q) {
            store(y + i * stride + at, low, p);
            store(y + i * stride + at + 16, high, q);
        });
    }
};

struct ToFloat {
    Biased from;
    float* y;
    int64_t stride;
    void operator()(int64_t row, int64_t count, int64_t block, const Products& c) const {
        from.each(row, count, block, c, [&](int64_t i, int64_t at, __mmask16 low, __mmask16 high, __m512 p, __m512 q) {
            _mm512_mask_storeu_ps(y + i * stride + at, low, p);
            _mm512_mask_storeu_ps(y + i * stride + at + 16, high, q);
        });
    }
};

struct AddTo {  // x + product, in place
    Biased from;
    bf16* x;
    int64_t stride;
    void operator()(int64_t row, int64_t count, int64_t block, const Products& c) const {
        from.each(row, count, block, c, [&](int64_t i, int64_t at, __mmask16 low, __mmask16 high, __m512 p, __m512 q) {
            bf16* to = x + i * stride + at;
            store(to, low, _mm512_add_ps(load(to, low), p));
            store(to + 16, high, _mm512_add_ps(load(to + 16, high), q));
        });
    }
};

template <Activation ACTIVATION>
struct ActMul {  // of a gated weight: outputs 0-15 of a block are gates, 16-31 their ups; from.n is the padded width
    Biased from;
    bf16* y;
    int64_t width;
    void operator()(int64_t row, int64_t count, int64_t block, const Products& c) const {
        const __mmask16 mask = first(width - block * 16);
        from.each(row, count, block, c, [&](int64_t i, int64_t at, __mmask16, __mmask16, __m512 gate, __m512 up) {
            store(y + i * width + at / 2, mask, _mm512_mul_ps(activate<ACTIVATION>(gate), up));
        });
    }
};

// --- rows

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

inline int elementwise_threads(int64_t elements, int threads) { return elements < SMALL ? 1 : threads; }

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

// Leave of the kernel to use the tiles; 0 = granted. Once per process.
int32_t amx_request() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */); }

// weight [n, k] (contiguous) -> packed. gated: the halves of n are woven together, 16 gates and then their 16 ups.
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

// Rows ids[m] of a packed weight, not gated -> y [m, k].
void rows_of(const Weight* w, const int64_t* ids, int64_t m, bf16* y, int32_t threads) {
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
}

// x [m, k] with row stride `stride` -> y [m, n] bfloat16, or float32 if `wide`. If k is no multiple of 32, x is padded.
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

// What follows attention in a layer. All widths are multiples of 32.
struct Tail {
    Weight o, gate_up, down;
    const bf16 *norm, *next_norm;
    float eps;
    Activation activation;
};

//     x += o(attended)      x += down(act(gate) * up), gate and up of norm(x)      normed = next_norm(x)
// attended [m, o.k], x and normed [m, o.n].
void tail(const Tail* t, const bf16* attended, bf16* x, bf16* normed, int64_t m, int32_t threads) {
    const int64_t hidden = t->o.n, inner = t->down.k;
    static thread_local Scratch shared_scratch;
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
        product(to, inner, rows, t->down, blocks(t->down),
                AddTo{{t->down.bias, hidden}, x, hidden});
        barrier.wait(parts);
        norm(t->next_norm);
    };
    team(threads, [&](int index, int count) {
        if (!by_rows) return layer({0, m}, index, count, shared);
        static thread_local Scratch own;
        const Range rows = share(m, 32, index, count);
        for (int64_t at = rows.begin; at < rows.end; at += PIECE_ROWS)
            layer({at, std::min(at + PIECE_ROWS, rows.end)}, 0, 1, own.get(PIECE_ROWS * inner));
    });
}

}  // extern "C"
