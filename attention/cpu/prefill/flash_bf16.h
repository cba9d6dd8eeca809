// flash.h with bfloat16 products summed in float32: AMX tiles, or vdpbf16ps where there is no AMX.
//
// Both multiply a left operand of rows of 32 elements with a right one whose pairs of rows are interleaved:
//   K [keys, size]            left: straight from the pool (copied if 16 keys are not adjacent, or size % 32, or codes)
//   Q^T [size / 2, COLUMNS]   right: pairs of elements of one query, packed once per item
//   V^T [size, KEYS]          left: transposed once per pass, for all columns of the item
//   P^T [KEYS / 2, COLUMNS]   right: pairs of keys, as the softmax writes them
#pragma once
#include "codes.h"
#include "flash.h"

#ifdef __AVX512BF16__

// c [32 or 16 rows, COLUMNS] (+)= left [rows, GRAIN depth] x right [GRAIN / 2 depth, COLUMNS] of interleaved pairs.
struct VectorProduct {
  static constexpr int GRAIN = 8;
  static void configure() {}
  static void release() {}

  static void rows8(float *c, const Bf16 *left, int64_t row, const uint32_t *right, int depth, bool add) {
    __m512 sum[8][2];
    for (int r = 0; r < 8; r++)
      for (int h = 0; h < 2; h++) sum[r][h] = add ? (__m512)load(c + r * COLUMNS + 16 * h) : _mm512_setzero_ps();
    for (int i = 0; i < GRAIN / 2 * depth; i++) {
      const __m512bh x = (__m512bh)_mm512_loadu_si512(right + i * COLUMNS);
      const __m512bh y = (__m512bh)_mm512_loadu_si512(right + i * COLUMNS + 16);
      for (int r = 0; r < 8; r++) {
        int32_t pair;
        memcpy(&pair, left + r * row + 2 * i, 4);
        const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], factor, x);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], factor, y);
      }
    }
    for (int r = 0; r < 8; r++)
      for (int h = 0; h < 2; h++) store(c + r * COLUMNS + 16 * h, (Vec)sum[r][h]);
  }

  // Half of c [32, COLUMNS] = left x right: its first `rows`.
  static void half(float *c, const Bf16 *upper, const Bf16 *lower, int64_t row, const uint32_t *right, int depth, int half,
                   int rows) {
    for (int r = 0; r < std::min(rows, 16); r += 8)
      rows8(c + (16 * half + r) * COLUMNS, (half ? lower : upper) + r * row, row, right, depth, false);
  }

  // `upper` and `lower`: 16 rows each, lower null for none
  static void run(float *c, const Bf16 *upper, const Bf16 *lower, int64_t row, const uint32_t *right, int depth, bool add) {
    for (int r = 0; r < 16; r += 8) rows8(c + r * COLUMNS, upper + r * row, row, right, depth, add);
    for (int r = 0; lower && r < 16; r += 8) rows8(c + (16 + r) * COLUMNS, lower + r * row, row, right, depth, add);
  }
};

#ifdef __AMX_BF16__
struct AmxProduct {
  static constexpr int GRAIN = 32;
  static void configure() {
    struct alignas(64) { uint8_t palette = 1, start = 0, pad[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } t;
    for (int i = 0; i < 8; i++) t.bytes[i] = 64, t.rows[i] = 16;
    asm volatile("" : : "r"(&t) : "memory");  // the intrinsic does not tell the compiler that it reads all of t
    _tile_loadconfig(&t);
  }
  static void release() { _tile_release(); }

  // Half of the products of c [32, COLUMNS] = left x right; between the halves the tiles hold them.
  static void half(float *c, const Bf16 *upper, const Bf16 *lower, int64_t row, const uint32_t *right, int depth, int half,
                   int) {
    constexpr int WIDE = COLUMNS * 4;
    const int middle = (depth + 1) / 2;
    if (!half) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int i = half ? middle : 0; i < (half ? depth : middle); i++) {
      _tile_loadd(4, upper + 32 * i, row * 2);
      _tile_loadd(6, right + 16 * i * COLUMNS, WIDE);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, right + 16 * i * COLUMNS + 16, WIDE);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, lower + 32 * i, row * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    if (!half) return;
    _tile_stored(0, c, WIDE);
    _tile_stored(1, c + 16, WIDE);
    _tile_stored(2, c + 16 * COLUMNS, WIDE);
    _tile_stored(3, c + 16 * COLUMNS + 16, WIDE);
  }

  static void run(float *c, const Bf16 *upper, const Bf16 *lower, int64_t row, const uint32_t *right, int depth, bool add) {
    constexpr int WIDE = COLUMNS * 4;
    const int64_t bytes = row * 2;
    if (add) {
      _tile_loadd(0, c, WIDE);
      _tile_loadd(1, c + 16, WIDE);
    } else {
      _tile_zero(0);
      _tile_zero(1);
    }
    if (!lower) {
      for (int i = 0; i < depth; i++) {
        _tile_loadd(4, upper + 32 * i, bytes);
        _tile_loadd(6, right + 16 * i * COLUMNS, WIDE);
        _tile_loadd(7, right + 16 * i * COLUMNS + 16, WIDE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
    } else {
      if (add) {
        _tile_loadd(2, c + 16 * COLUMNS, WIDE);
        _tile_loadd(3, c + 16 * COLUMNS + 16, WIDE);
      } else {
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int i = 0; i < depth; i++) {
        _tile_loadd(4, upper + 32 * i, bytes);
        _tile_loadd(6, right + 16 * i * COLUMNS, WIDE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + 16 * i * COLUMNS + 16, WIDE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, lower + 32 * i, bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(2, c + 16 * COLUMNS, WIDE);
      _tile_stored(3, c + 16 * COLUMNS + 16, WIDE);
    }
    _tile_stored(0, c, WIDE);
    _tile_stored(1, c + 16, WIDE);
  }
};
#endif

template <class Product> struct Bf16Path {
  static constexpr int DEGREE = 3, GRAIN = Product::GRAIN;
  int size, depth;      // depth: parts of 32 elements in a head, the last perhaps half zero
  float *s;             // [2, STEP, COLUMNS]
  uint32_t *p;          // [KEYS / 2, COLUMNS] pairs
  uint32_t *q;          // [tiles, 16 depth, COLUMNS] pairs
  Bf16 *vt;             // [size, KEYS]
  Bf16 *copy;           // [KEYS, 32 depth]
  Bf16 *wide;           // [32, size]: V of a quantized pool
  const Bf16 *k[KEYS / 16];  // 16 keys each
  int64_t k_row;
  const Attend *a;
  PrefillItem item;

  static int parts(int size) { return (size + 31) / 32; }
  static size_t scratch(int size, int tiles) {
    return 2 * STEP * COLUMNS + KEYS / 2 * COLUMNS + tiles * 16 * parts(size) * COLUMNS + size * KEYS / 2 +
           KEYS * 16 * parts(size) + 16 * size;
  }

  Bf16Path(float *memory, int size) : size(size), depth(parts(size)), s(memory) {
    p = (uint32_t *)(s + 2 * STEP * COLUMNS);
    vt = (Bf16 *)(p + KEYS / 2 * COLUMNS);
    copy = vt + size * KEYS;
    wide = copy + KEYS * 32 * depth;
    q = (uint32_t *)(wide + 32 * size);
    memset(copy, 0, KEYS * 32 * depth * sizeof *copy);  // what pads a head to whole parts stays zero
  }

  void begin(const Attend &attend, const PrefillItem &of, int tiles) {
    a = &attend;
    item = of;
    const int group = a->group(), row0 = a->cu_q[item.request], count = item.end - item.begin;
    Column column(item.begin, group);
    for (int i = 0; i < tiles * COLUMNS; i += 16) {
      const Bf16 *row[16];
      for (int lane = 0; lane < 16; lane++) {
        row[lane] = (const Bf16 *)a->q + (row0 + column.row) * a->q_row + (item.head * group + column.head) * a->q_head;
        if (i + lane + 1 < count) column.advance();
      }
      for (int c = 0; c < depth; c++) {
        IntVec block[16];
        const __mmask32 mask = size - 32 * c >= 32 ? 0xffffffff : 0xffff;
        for (int lane = 0; lane < 16; lane++) block[lane] = (IntVec)_mm512_maskz_loadu_epi16(mask, row[lane] + 32 * c);
        transpose(block);
        uint32_t *to = q + ((int64_t)i / COLUMNS * depth + c) * 16 * COLUMNS + i % COLUMNS;
        for (int pair = 0; pair < 16; pair++, to += COLUMNS) _mm512_storeu_si512(to, (__m512i)block[pair]);
      }
    }
  }

  void load_keys(int key, int count) {
    const Tokens<Bf16> keys(*a, item.request, item.head, 0), values(*a, item.request, item.head, 1);
    const bool codes = a->kv.quantized(), adjacent = !codes && keys.block_size % 16 == 0 && size % 32 == 0;
    const int padded = (count + STEP - 1) / STEP * STEP;
    k_row = adjacent ? keys.token : 32 * depth;  // `key` is a multiple of 16
    if (codes) widen_tokens(*a, item.request, item.head, 0, key, count, k_row, copy);
    for (int j = 0; j < padded; j += 16) {
      k[j / 16] = adjacent ? keys[key + (j < count ? j : 0)] : copy + j * k_row;
      if (!adjacent && !codes)
        for (int i = j; i < std::min(j + 16, count); i++)
          for (int c = 0; c < depth; c++) {
            const __mmask32 mask = size - 32 * c >= 32 ? 0xffffffff : 0xffff;
            _mm512_storeu_si512(copy + i * k_row + 32 * c, _mm512_maskz_loadu_epi16(mask, keys[key + i] + 32 * c));
          }
    }
    typename Tokens<Bf16>::Cursor cursor(values, key);
    for (int j = 0; j < padded; j += 32) {
      const Bf16 *row[32];
      const int used = std::min(32, count - j);
      if (codes) widen_tokens(*a, item.request, item.head, 1, key + j, used, size, wide);
      for (int i = 0; i < used; i++) {
        row[i] = wide + i * size;
        if (codes) continue;
        row[i] = cursor.at;
        cursor.advance(j + i + 1 < count);
      }
      transpose_values(row, used, vt + j);
    }
  }

  // 32 tokens: token pairs become the dwords of rows; tokens from `count` on become zero and are not read.
  void transpose_values(const Bf16 *const *row, int count, Bf16 *to) {
    for (int d = 0; d < size; d += 16) {
      IntVec block[16];
      for (int pair = 0; pair < 16; pair++) {
        const int i = 2 * pair;
        const IntVec even = i < count ? (IntVec)load(row[i] + d) : IntVec{};
        const IntVec odd = i + 1 < count ? (IntVec)load(row[i + 1] + d) : IntVec{};
        block[pair] = odd | (IntVec)_mm512_srli_epi32((__m512i)even, 16);
      }
      transpose(block);
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + (d + i) * KEYS, (__m512i)block[i]);
    }
  }

  float *scored(int step) const { return s + step % 2 * STEP * COLUMNS; }

  // Half of the products of one STEP: the second call finds those of the first in the tiles.
  void scores(const Scores &of, int half) {
    const uint32_t *right = q + (int64_t)of.tile * 16 * depth * COLUMNS;
    const Bf16 *const *keys = k + of.step * STEP / 16;
    Product::half(scored(of.step), keys[0], keys[1], k_row, right, 32 / GRAIN * depth, half,
                  of.keys<Bf16Path>() - half * STEP / 2);
  }

  void put(int j, int h, Vec even, Vec odd) {
    const __m512i order = (__m512i)(HalfOrder{0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    _mm512_storeu_si512(p + j / 2 * COLUMNS + h, _mm512_permutexvar_epi16(order, halves));
  }
  typedef uint16_t HalfOrder __attribute__((vector_size(64)));

  // The weights of the keys first .. last.
  void accumulate(float *o, int first, int last) {
    const Bf16 *v = vt + first;
    for (int d = 0; d < size; d += 32)
      Product::run(o + d * COLUMNS, v + d * KEYS, d + 16 < size ? v + (d + 16) * KEYS : nullptr, KEYS,
                   p + first / 2 * COLUMNS, (last - first) / GRAIN, true);
  }
};

#endif
