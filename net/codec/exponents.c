/* Codes and decodes the exponents of floats without loss; net/codec/definition.py defines the bytes.

   Tiles of TILE elements. Every loop over the elements of a tile is plain C that a compiler turns into vector code of
   any width: exponents are coded as differences from the tile's base, so no table is read per element. Codes of `width`
   bits are packed eight at a time within 64-bit words. All numbers are little endian, like the machines that compile this.

   encode() reads whole tiles and writes at most bound() bytes. decode() checks every length before it reads or writes:
   it neither leaves `coded` nor `raw`, whatever the bytes are. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { TILE = 4096, HEAD = 4, RAW = 255, WIDTH_MAX = 6, SAMPLE_EVERY = 4, TABLES = 4 };
enum { BFLOAT16 = 1, FLOAT16 = 2, FLOAT32 = 3 };
enum { FINE = 0, TRUNCATED = 1, BAD_WIDTH = 2, BAD_ESCAPES = 3, TOO_LONG = 4, BAD_KIND = 5 };

typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))

static size_t item_bytes(int kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 || kind == FLOAT16 ? 2 : 0; }

static size_t words(size_t n) { return (n + 7) / 8; }

/* Bytes of the signs and mantissas of n elements. */
INLINE size_t rest_bytes(size_t n, int kind)
{
    return kind == BFLOAT16 ? n : kind == FLOAT16 ? n + 3 * words(n) : 3 * n;
}

size_t bound(size_t nbytes) { return nbytes + HEAD * (nbytes / (2 * TILE) + 2) + 64; }

/* --- codes of a few bits, eight to a word: the lowest `width` bits of each byte, side by side */

/* The lowest `used` bits of each lane of `lane` bits. */
INLINE uint64_t lanes(int lane, int used)
{
    uint64_t mask = (UINT64_C(1) << used) - 1;
    for (int at = lane; at < 64; at *= 2)
        mask |= mask << at;
    return mask;
}

INLINE void pack(const uint8_t *codes, size_t groups, int width, uint8_t *out)
{
    const int gap = 8 - width;
    const uint64_t two = lanes(16, 2 * width), four = lanes(32, 4 * width);
    for (size_t g = 0; g < groups; g++) {
        uint64_t t;
        memcpy(&t, codes + 8 * g, 8);
        t = (t | t >> gap) & two;
        t = (t | t >> 2 * gap) & four;
        t |= t >> 4 * gap;
        memcpy(out + width * g, &t, 8); /* the bytes above 8 * width bits are overwritten by what follows */
    }
}

INLINE void unpack(const uint8_t *packed, size_t groups, int width, uint8_t *codes)
{
    const int gap = 8 - width;
    const uint64_t one = lanes(8, width), two = lanes(16, 2 * width), four = lanes(32, 4 * width);
    const uint64_t all = (UINT64_C(1) << 8 * width) - 1;
    for (size_t g = 0; g < groups; g++) {
        uint64_t t = 0;
        if (width * g + 8 <= width * groups)
            memcpy(&t, packed + width * g, 8);
        else
            memcpy(&t, packed + width * g, width); /* the last words: nothing behind them belongs to them */
        t &= all;
        t = (t | t << 4 * gap) & four;
        t = (t | t << 2 * gap) & two;
        t = (t | t << gap) & one;
        memcpy(codes + 8 * g, &t, 8);
    }
}

/* 0x80 in each byte of t that equals the byte repeated in `wanted`. */
INLINE uint64_t equal(uint64_t t, uint64_t wanted)
{
    const uint64_t low = UINT64_C(0x7f7f7f7f7f7f7f7f);
    t ^= wanted;
    return ~(((t & low) + low) | t | low);
}

/* --- exponents apart from signs and mantissas */

INLINE void split(const uint8_t *raw, size_t n, int kind, uint8_t *exponents, uint8_t *rest)
{
    if (kind == FLOAT32) {
        const u32 *x = (const u32 *)raw;
        uint8_t *low = rest, *middle = rest + n, *high = rest + 2 * n;
        for (size_t i = 0; i < n; i++)
            exponents[i] = x[i] >> 23;
        for (size_t i = 0; i < n; i++)
            low[i] = x[i];
        for (size_t i = 0; i < n; i++)
            middle[i] = x[i] >> 8;
        for (size_t i = 0; i < n; i++)
            high[i] = (x[i] >> 16 & 0x7f) | (x[i] >> 24 & 0x80);
        return;
    }
    const u16 *x = (const u16 *)raw;
    if (kind == BFLOAT16) {
        for (size_t i = 0; i < n; i++)
            exponents[i] = x[i] >> 7;
        for (size_t i = 0; i < n; i++)
            rest[i] = (x[i] & 0x7f) | (x[i] >> 8 & 0x80);
        return;
    }
    uint8_t high[TILE + 8];
    for (size_t i = 0; i < n; i++)
        exponents[i] = x[i] >> 10 & 0x1f;
    for (size_t i = 0; i < n; i++)
        rest[i] = x[i];
    for (size_t i = 0; i < n; i++)
        high[i] = (x[i] >> 8 & 3) | (x[i] >> 13 & 4);
    memset(high + n, 0, 8);
    pack(high, words(n), 3, rest + n);
}

INLINE void join(const uint8_t *exponents, const uint8_t *rest, size_t n, int kind, uint8_t *raw)
{
    if (kind == FLOAT32) {
        u32 *x = (u32 *)raw;
        const uint8_t *low = rest, *middle = rest + n, *high = rest + 2 * n;
        for (size_t i = 0; i < n; i++)
            x[i] = (uint32_t)low[i] | (uint32_t)middle[i] << 8 | (uint32_t)(high[i] & 0x7f) << 16 |
                   (uint32_t)exponents[i] << 23 | (uint32_t)(high[i] & 0x80) << 24;
        return;
    }
    u16 *x = (u16 *)raw;
    if (kind == BFLOAT16) {
        for (size_t i = 0; i < n; i++)
            x[i] = (rest[i] & 0x7f) | exponents[i] << 7 | (rest[i] & 0x80) << 8;
        return;
    }
    uint8_t high[TILE + 8];
    unpack(rest + n, words(n), 3, high);
    for (size_t i = 0; i < n; i++)
        x[i] = rest[i] | (high[i] & 3) << 8 | (exponents[i] & 0x1f) << 10 | (high[i] & 4) << 13;
}

/* --- one tile */

/* The base and the width of the codes by every SAMPLE_EVERYth exponent. */
INLINE int choose(const uint8_t *exponents, size_t n, int *base)
{
    uint16_t counts[TABLES][256] = {{0}};
    uint16_t sums[257];
    size_t i = 0;
    for (; i + TABLES * SAMPLE_EVERY <= n; i += TABLES * SAMPLE_EVERY) {
        counts[0][exponents[i]]++;
        counts[1][exponents[i + SAMPLE_EVERY]]++;
        counts[2][exponents[i + 2 * SAMPLE_EVERY]]++;
        counts[3][exponents[i + 3 * SAMPLE_EVERY]]++;
    }
    for (; i < n; i += SAMPLE_EVERY)
        counts[0][exponents[i]]++;
    int first = 256, last = 0;
    sums[0] = 0;
    for (int e = 0; e < 256; e++) {
        uint16_t count = counts[0][e] + counts[1][e] + counts[2][e] + counts[3][e];
        sums[e + 1] = sums[e] + count;
        if (count) {
            first = first < e ? first : e;
            last = e;
        }
    }
    const uint32_t samples = sums[256];
    if (first == last) { /* the tile may still have other exponents */
        size_t others = 0;
        for (size_t at = 0; at < n; at++)
            others += exponents[at] != first;
        if (!others) {
            *base = first;
            return 0;
        }
    }
    uint32_t least = UINT32_MAX;
    int width = 1;
    for (int w = 1; w <= WIDTH_MAX; w++) {
        const int span = (1 << w) - 1;
        for (int from = first; from <= last; from++) {
            const int to = from + span < 256 ? from + span : 256;
            const uint32_t bits = w * samples + 8 * (samples - (uint32_t)(sums[to] - sums[from]));
            if (bits < least) {
                least = bits;
                width = w;
                *base = from;
            }
        }
    }
    return width;
}

INLINE size_t raw_tile(const uint8_t *raw, size_t nbytes, uint8_t *out)
{
    out[0] = RAW;
    out[1] = out[2] = out[3] = 0;
    memcpy(out + HEAD, raw, nbytes);
    return HEAD + nbytes;
}

INLINE size_t encode_tile(const uint8_t *raw, size_t n, int kind, uint8_t *out)
{
    uint8_t exponents[TILE], codes[TILE + 8];
    const size_t whole = n * item_bytes(kind), rest = rest_bytes(n, kind), groups = words(n);
    int base = 0;
    split(raw, n, kind, exponents, out + HEAD);
    const int width = choose(exponents, n, &base), escape = (1 << width) - 1;
    size_t escapes = 0;
    if (width) {
        for (size_t i = 0; i < n; i++) {
            const uint8_t code = exponents[i] - base;
            codes[i] = code < escape ? code : escape;
        }
        uint32_t found = 0;
        for (size_t i = 0; i < n; i++)
            found += codes[i] == escape;
        escapes = found;
    }
    if (rest + width * groups + escapes >= whole)
        return raw_tile(raw, whole, out);
    out[0] = width;
    out[1] = base;
    out[2] = escapes;
    out[3] = escapes >> 8;
    if (!width)
        return HEAD + rest;
    memset(codes + n, 0, 8);
    pack(codes, groups, width, out + HEAD + rest);
    uint8_t *next = out + HEAD + rest + width * groups;
    if (escapes) {
        const uint64_t wanted = UINT64_C(0x0101010101010101) * escape;
        for (size_t g = 0; g < groups; g++) {
            uint64_t t;
            memcpy(&t, codes + 8 * g, 8);
            for (t = equal(t, wanted); t; t &= t - 1)
                *next++ = exponents[8 * g + __builtin_ctzll(t) / 8];
        }
    }
    return next - out;
}

/* Writes n elements; *used becomes the bytes of the tile. */
INLINE int decode_tile(const uint8_t *coded, size_t room, size_t n, int kind, uint8_t *raw, size_t *used)
{
    uint8_t exponents[TILE + 8];
    uint16_t places[TILE];
    const size_t whole = n * item_bytes(kind), rest = rest_bytes(n, kind), groups = words(n);
    if (room < HEAD)
        return TRUNCATED;
    const int width = coded[0], base = coded[1], escape = (1 << (width & 7)) - 1;
    const size_t escapes = coded[2] | (size_t)coded[3] << 8;
    if (width == RAW) {
        if (room < HEAD + whole)
            return TRUNCATED;
        memcpy(raw, coded + HEAD, whole);
        *used = HEAD + whole;
        return FINE;
    }
    if (width > WIDTH_MAX)
        return BAD_WIDTH;
    if (escapes > n || (!width && escapes))
        return BAD_ESCAPES;
    *used = HEAD + rest + width * groups + escapes;
    if (room < *used)
        return TRUNCATED;
    if (!width) {
        memset(exponents, base, n);
    } else {
        size_t found = 0;
        unpack(coded + HEAD + rest, groups, width, exponents);
        const uint64_t wanted = UINT64_C(0x0101010101010101) * escape;
        for (size_t g = 0; g < groups; g++) {
            uint64_t t;
            memcpy(&t, exponents + 8 * g, 8);
            for (t = equal(t, wanted); t; t &= t - 1) {
                if (found == escapes)
                    return BAD_ESCAPES;
                places[found++] = 8 * g + __builtin_ctzll(t) / 8;
            }
        }
        if (found != escapes)
            return BAD_ESCAPES;
        for (size_t i = 0; i < n; i++)
            exponents[i] += base;
        const uint8_t *listed = coded + HEAD + rest + width * groups;
        for (size_t i = 0; i < escapes; i++)
            exponents[places[i]] = listed[i];
    }
    join(exponents, coded + HEAD, n, kind, raw);
    return FINE;
}

/* --- all tiles */

INLINE size_t encode_all(const uint8_t *raw, size_t nbytes, int kind, uint8_t *out)
{
    const size_t item = kind == FLOAT32 ? 4 : 2, count = nbytes / item;
    uint8_t *next = out;
    for (size_t i = 0; i < count; i += TILE)
        next += encode_tile(raw + i * item, count - i < TILE ? count - i : TILE, kind, next);
    memcpy(next, raw + count * item, nbytes - count * item);
    return next + (nbytes - count * item) - out;
}

INLINE int decode_all(const uint8_t *coded, size_t nbytes, int kind, uint8_t *raw, size_t raw_bytes)
{
    const size_t item = kind == FLOAT32 ? 4 : 2, count = raw_bytes / item, odd = raw_bytes - count * item;
    size_t at = 0;
    for (size_t i = 0; i < count; i += TILE) {
        size_t used = 0;
        const int why = decode_tile(coded + at, nbytes - at, count - i < TILE ? count - i : TILE, kind, raw + i * item, &used);
        if (why != FINE)
            return why;
        at += used;
    }
    if (nbytes - at != odd)
        return nbytes - at < odd ? TRUNCATED : TOO_LONG;
    memcpy(raw + count * item, coded + at, odd);
    return FINE;
}

/* Codes `nbytes` bytes into out, which has bound(nbytes) bytes; returns the bytes written, 0 for an unknown kind. */
size_t encode(const uint8_t *raw, size_t nbytes, int kind, uint8_t *out)
{
    switch (kind) {
    case BFLOAT16: return encode_all(raw, nbytes, BFLOAT16, out);
    case FLOAT16: return encode_all(raw, nbytes, FLOAT16, out);
    case FLOAT32: return encode_all(raw, nbytes, FLOAT32, out);
    }
    return 0;
}

/* Decodes `nbytes` bytes into raw, which has exactly raw_bytes bytes; returns FINE or the damage that was found. */
int decode(const uint8_t *coded, size_t nbytes, int kind, uint8_t *raw, size_t raw_bytes)
{
    switch (kind) {
    case BFLOAT16: return decode_all(coded, nbytes, BFLOAT16, raw, raw_bytes);
    case FLOAT16: return decode_all(coded, nbytes, FLOAT16, raw, raw_bytes);
    case FLOAT32: return decode_all(coded, nbytes, FLOAT32, raw, raw_bytes);
    }
    return BAD_KIND;
}
