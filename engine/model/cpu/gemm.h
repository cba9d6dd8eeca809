// y = x w^T on the AMX tiles of one thread, for a bfloat16 weight packed once in the order in which it is read.
//
// Packed weight: blocks of 32 outputs; inside a block the inputs in steps of 32; a step is two tiles of 16 outputs.
// A tile is what tdpbf16ps wants of its right operand: 16 rows of input pairs, [16 pairs][16 outputs][2], 1 KiB.
//
//     packed [ceil(n / 32)][ceil(k / 32)][2][16][16][2]      zeros where n or k end inside
//
// So a thread that computes a range of outputs reads one ascending stream of memory, whatever the number of rows m:
// at m = 1 that stream is the whole cost, and at large m a block stays in the L1 or L2 cache while the rows of x pass.
//
// Products are accumulated in float32 over all of k and handed, 32 x 32 at a time, to an epilogue that rounds once.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "team.h"
#include "vectors.h"

constexpr int64_t STEP_BYTES = 2048;  // two tiles
constexpr int64_t PREFETCH_BYTES = 1024;  // ahead in the stream; at m = 32 twice as far is 18 % slower, 4 KiB 25 %

struct Weight {
    const bf16* packed;
    const float* bias;  // padded to whole blocks, or null
    int64_t n, k;
    int64_t steps() const { return (k + 31) / 32; }
    int64_t blocks() const { return (n + 31) / 32; }
};

// This thread's tile shapes: tiles 0..3 hold the products, 4 and 5 rows of x, 6 and 7 the weight. What was configured
// before (oneDNN remembers its own choice) is put back at the end.
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
    // The compiler's intrinsic claims to read 8 bytes of the 64, so that stores to the others may be dropped.
    static void load(const uint8_t* config) {
        asm volatile("" : : "r"(config) : "memory");
        _tile_loadconfig(config);
    }

    alignas(64) uint8_t before_[64];
    int64_t rows_ = 0;
};

// 32 x 32 products as four tiles: rows 0-15 and 16-31 of x, outputs 0-15 and 16-31 of the block.
struct Products {
    alignas(64) float tile[4][256];
    __m512 row(int64_t i, int half) const { return _mm512_load_ps(tile[i / 16 * 2 + half] + i % 16 * 16); }
};

// x [rows <= 32, 32 steps] times one block. `stream`: the block comes from memory and not from a cache.
template <bool TWO, bool STREAM>
inline void multiply(const bf16* x, int64_t stride, const bf16* block, int64_t steps, Products& c) {
    const char* w = reinterpret_cast<const char*>(block);
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
    }
    _tile_stored(0, c.tile[0], 64);
    _tile_stored(1, c.tile[1], 64);
    if (TWO) {
        _tile_stored(2, c.tile[2], 64);
        _tile_stored(3, c.tile[3], 64);
    }
}

// Rows [rows] of x (element stride `stride`, k a multiple of 32 or padded with zeros) times the blocks [blocks] of w.
// epilogue(row, count, block, products) gets each piece of up to 32 rows.
template <class Epilogue>
void product(const bf16* x, int64_t stride, Range rows, const Weight& w, Range blocks, const Epilogue& epilogue) {
    Tiles tiles;
    Products c;
    const int64_t steps = w.steps();
    for (int64_t b = blocks.begin; b < blocks.end; b++) {
        const bf16* block = w.packed + b * steps * (STEP_BYTES / 2);
        for (int64_t m = rows.begin; m < rows.end; m += 32) {
            const int64_t count = std::min<int64_t>(32, rows.end - m);
            const bf16* part = x + m * stride;
            tiles.rows(count);
            if (m > rows.begin)
                count > 16 ? multiply<true, false>(part, stride, block, steps, c)
                           : multiply<false, false>(part, stride, block, steps, c);
            else
                count > 16 ? multiply<true, true>(part, stride, block, steps, c)
                           : multiply<false, true>(part, stride, block, steps, c);
            epilogue(m, count, b, c);
        }
    }
}
