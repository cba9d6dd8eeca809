// y = x w^T on the AMX tiles of one thread, for a bfloat16 weight packed once in the order in which it is read.
//
// Packed weight: blocks of 32 outputs; each block has its inputs in steps of 32; a step is two tiles of 16 outputs.
// A tile has the layout of tdpbf16ps's right operand: 16 rows of input pairs, [16 pairs][16 outputs][2], 1 KiB.
//
//     packed [ceil(n / 32)][ceil(k / 32)][2][16][16][2]      padded with zeros beyond n and k
//
// A thread that computes a range of outputs thus reads one ascending stream of memory for any number of rows m. At
// m = 1, this stream is the whole cost. At large m, a block stays in the L1 or L2 cache for all rows of x, and the next
// block is prefetched meanwhile.
//
// One thread, 256 rows, weights from memory: 1.3 TFLOP/s; 0.95 without prefetching the next block and with an epilogue
// that did not overlap. Tile products in registers reach 3.2 on zeros and 2.5 on other numbers (the clock falls), and
// 1.75 with operands from the L2 cache: 32 x 32 products read 64 bytes per cycle from it.
//
// Products are accumulated in float32 over all of k. An epilogue takes them, 32 x 32 at a time, and rounds once.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "team.h"
#include "vectors.h"

constexpr int STEP = 32;
#include "weight.h"

constexpr int ROWS = 32;  // of a product of four tiles
constexpr int64_t STEP_BYTES = 2048;  // two tiles
constexpr int64_t PREFETCH_BYTES = 1024;  // ahead in the stream; at m = 32, 2 KiB is 18 % slower, 4 KiB 25 %

// Where element (output, input) of a packed weight is.
inline int64_t packed_at(const Weight& w, int64_t output, int64_t input) {
    const int64_t tile = (output / 32 * w.steps() + input / 32) * 2 + output % 32 / 16;
    return tile * 512 + input % 32 / 2 * 32 + output % 16 * 2 + input % 2;
}

// Row `output` of a packed weight, not gated -> y [k].
inline void read_output(const Weight& w, int64_t output, Element* y) {
    for (int64_t first = 0; first < w.k; first += STEP) {
        const Element* from = w.packed + packed_at(w, output, first);
        const int64_t count = std::min<int64_t>(STEP, w.k - first);
        for (int64_t i = 0; i < count; i++) y[first + i] = from[i / 2 * 32 + i % 2];
    }
}

// This thread's tile shapes: tiles 0..3 contain the products, 4 and 5 rows of x, 6 and 7 the weight. The destructor
// restores the previous configuration, because oneDNN remembers its own.
class Tiles {
  public:
    Tiles() { _tile_storeconfig(before_); }
    ~Tiles() {
        if (before_[0])
            load(before_);
        else
            _tile_release();
    }
    void rows(int64_t m) {
        if (m == rows_) return;
        rows_ = m;
        alignas(64) uint8_t config[64] = {1};  // palette 1; bytes per row at 16, rows at 48
        const uint8_t top = std::min<int64_t>(m, 16), bottom = std::max<int64_t>(m - 16, 1);
        const uint8_t height[8] = {top, top, bottom, bottom, top, bottom, 16, 16};
        for (int tile = 0; tile < 8; tile++) {
            config[16 + 2 * tile] = 64;
            config[48 + tile] = height[tile];
        }
        load(config);
    }

  private:
    // The compiler's intrinsic claims to read only 8 of the 64 bytes, so the compiler might drop stores to the others.
    static void load(const uint8_t* config) {
        asm volatile("" : : "r"(config) : "memory");
        _tile_loadconfig(config);
    }

    alignas(64) uint8_t before_[64];
    int64_t rows_ = 0;
};

// 32 x 32 products as four tiles: rows 0-15 and 16-31 of x, outputs 0-15 and 16-31 of the block. Their epilogue runs
// row by row during the next tile products, which do not use the vector units and, at few rows, wait for the weight
// from memory.
struct Products {
    alignas(64) float tile[4][256];
    int64_t row, block;  // of the first product
    int64_t count = 0, done = 0;  // rows

    template <class Epilogue>
    void finish(int64_t rows, const Epilogue& epilogue) {
        for (const int64_t end = std::min(count, done + rows); done < end; done++) {
            const float* at = tile[done / 16 * 2] + done % 16 * 16;
            epilogue(row + done, block, load(at), load(at + 256));
        }
    }
};

// The prefetch into the L2 cache: `lines` cache lines in each step, from `at` on.
struct Ahead {
    const char* at;
    int64_t lines;
};

// x [rows <= 32, 32 steps] times one block; meanwhile finishes `before` and prefetches `ahead`. STREAM: the block is
// read from memory instead of a cache.
template <bool TWO, bool STREAM, class Epilogue>
inline void multiply(const Element* x, int64_t stride, const Element* block, int64_t steps, Products& c, Products& before,
                     Ahead ahead, const Epilogue& epilogue) {
    const char* w = reinterpret_cast<const char*>(block);
    const int64_t rows = (before.count + steps - 1) / steps;
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; s++, w += STEP_BYTES, x += 32) {
        if (STREAM)
            for (int line = 0; line < STEP_BYTES; line += 64) _mm_prefetch(w + PREFETCH_BYTES + line, _MM_HINT_T0);
        _tile_loadd(6, w, 64);
        _tile_loadd(4, x, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + STEP_BYTES / 2, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, x + 16 * stride, stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (int64_t line = 0; line < ahead.lines; line++, ahead.at += 64) _mm_prefetch(ahead.at, _MM_HINT_T1);
        before.finish(rows, epilogue);
    }
    _tile_stored(0, c.tile[0], 64);
    _tile_stored(1, c.tile[1], 64);
    if (TWO) {
        _tile_stored(2, c.tile[2], 64);
        _tile_stored(3, c.tile[3], 64);
    }
}

// Rows [rows] of x (element stride `stride`, k a multiple of 32 or padded with zeros) times the blocks [blocks] of w.
// The epilogue (weight.h) gets each row of each block.
template <class Epilogue>
void product(const Element* x, int64_t stride, Range rows, const Weight& w, Range blocks, const Epilogue& epilogue) {
    Tiles tiles;
    Products products[2];
    const int64_t steps = w.steps(), pieces = (rows.size() + 31) / 32;
    const int64_t lines = pieces > 1 ? (STEP_BYTES / 64 + pieces - 2) / (pieces - 1) : 0;  // the first piece fetches none
    int now = 0;
    for (int64_t b = blocks.begin; b < blocks.end; b++) {
        const Element* block = w.block(b);
        for (int64_t piece = 0; piece < pieces; piece++, now ^= 1) {
            const int64_t m = rows.begin + 32 * piece, count = std::min<int64_t>(32, rows.end - m);
            const Element* part = x + m * stride;
            const char* next = reinterpret_cast<const char*>(block) + steps * (STEP_BYTES + (piece - 1) * lines * 64);
            const Ahead ahead{next, piece && b + 1 < blocks.end ? lines : 0};
            Products &c = products[now], &before = products[now ^ 1];
            tiles.rows(count);
            if (piece || (lines && b > blocks.begin))
                count > 16 ? multiply<true, false>(part, stride, block, steps, c, before, ahead, epilogue)
                           : multiply<false, false>(part, stride, block, steps, c, before, ahead, epilogue);
            else
                count > 16 ? multiply<true, true>(part, stride, block, steps, c, before, ahead, epilogue)
                           : multiply<false, true>(part, stride, block, steps, c, before, ahead, epilogue);
            c.row = m, c.block = b, c.count = count, c.done = 0;
        }
    }
    products[now ^ 1].finish(32, epilogue);
}
