/* Codes and decodes the exponents of floats without loss; net/codec/definition.py defines the bytes.

   Tiles of TILE elements. Every loop over the elements of a tile is plain C that a compiler turns into vector code of
   any width: exponents are coded as differences from the tile's base, so no table is read per element. Codes of `width`
   bits are packed eight at a time within 64-bit words. All numbers are little endian, like the machines that compile this.

   encode() reads whole tiles and writes at most bound() bytes. decode() checks every length before it reads or writes:
   it neither leaves `coded` nor `raw`, whatever the bytes are. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { TILE = 8192, HEAD = 4, RAW = 255, WIDTH_MAX = 6, SAMPLE_EVERY = 8, TABLES = 4 };
enum { BFLOAT16 = 1, FLOAT16 = 2, FLOAT32 = 3 };
enum { FINE = 0, TRUNCATED = 1, BAD_WIDTH = 2, BAD_ESCAPES = 3, TOO_LONG = 4, BAD_KIND = 5 };

typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));

/* Each step has a function and a call of its own: inlined into one another, compilers lose what they know about aliases,
   and with it the vector code. */
#define STEP static __attribute__((noinline))

static size_t item_bytes(int kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 || kind == FLOAT16 ? 2 : 0; }

static size_t words(size_t n) { return (n + 7) / 8; }

/* Bytes of the signs and mantissas of n elements. */
static size_t rest_bytes(size_t n, int kind)
{
    return kind == BFLOAT16 ? n : kind == FLOAT16 ? n + 3 * words(n) : 3 * n;
}

size_t bound(size_t nbytes) { return nbytes + HEAD * (nbytes / (2 * TILE) + 2) + 64; }

/* --- codes of a few bits, eight to a word: the lowest `width` bits of each byte, side by side */

/* The lowest `used` bits of each lane of `lane` bits. */
static uint64_t lanes(int lane, int used)
{
    uint64_t mask = (UINT64_C(1) << used) - 1;
    for (int at = lane; at < 64; at *= 2)
        mask |= mask << at;
    return mask;
}

STEP void pack(const uint8_t *restrict codes, size_t groups, int width, uint8_t *restrict out)
{
    const int gap = 8 - width;
    const uint64_t one = lanes(16, width), two = lanes(32, 2 * width), four = lanes(64, 4 * width);
    uint64_t t[TILE / 8];
    memcpy(t, codes, 8 * groups);
    for (size_t g = 0; g < groups; g++) {
        t[g] = (t[g] & one) | (t[g] >> gap & one << width);
        t[g] = (t[g] & two) | (t[g] >> 2 * gap & two << 2 * width);
        t[g] = (t[g] & four) | (t[g] >> 4 * gap & four << 4 * width);
    }
    for (size_t g = 0; g < groups; g++)
        memcpy(out + width * g, &t[g], 8); /* the bytes above 8 * width bits are overwritten by what follows */
}

STEP void unpack(const uint8_t *restrict packed, size_t groups, int width, uint8_t *restrict codes)
{
    const int gap = 8 - width;
    const uint64_t one = lanes(16, width), two = lanes(32, 2 * width), four = lanes(64, 4 * width);
    const size_t safe = groups < 8 ? 0 : groups - 8; /* a load of 8 bytes stays inside the last 8 words of codes */
    uint64_t t[TILE / 8];
    for (size_t g = 0; g < safe; g++)
        memcpy(&t[g], packed + width * g, 8);
    for (size_t g = safe; g < groups; g++) {
        t[g] = 0;
        memcpy(&t[g], packed + width * g, width);
    }
    for (size_t g = 0; g < groups; g++) {
        t[g] = (t[g] & four) | (t[g] << 4 * gap & four << 32);
        t[g] = (t[g] & two) | (t[g] << 2 * gap & two << 16);
        t[g] = (t[g] & one) | (t[g] << gap & one << 8);
    }
    memcpy(codes, t, 8 * groups);
}

/* Which codes are `escape`: bit i of flags[b] for code 64 b + i. Most words of 8 codes have none or one, which no branch
   predicts; with 64 at a time there is one wrong guess for many of them. */
STEP void find(const uint8_t *codes, size_t groups, int escape, uint64_t *flags)
{
    const uint64_t low = UINT64_C(0x7f7f7f7f7f7f7f7f), wanted = UINT64_C(0x0101010101010101) * escape;
    uint64_t equal[TILE / 8 + 8];
    for (size_t g = 0; g < groups; g++) { /* 0x80 in each byte that is the escape */
        uint64_t t;
        memcpy(&t, codes + 8 * g, 8);
        t ^= wanted;
        equal[g] = ~(((t & low) + low) | t | low);
    }
    memset(equal + groups, 0, 8 * sizeof *equal);
    for (size_t g = 0; g < groups; g += 8) {
        uint64_t found = 0;
        for (int k = 0; k < 8; k++) /* the product gathers the highest bit of each byte in the top byte */
            found |= (equal[g + k] * UINT64_C(0x0002040810204081) >> 56) << 8 * k;
        flags[g / 8] = found;
    }
}

/* --- exponents apart from signs and mantissas */

STEP void split(const uint8_t *restrict raw, size_t n, int kind, uint8_t *restrict exponents, uint8_t *restrict rest)
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

STEP void join(const uint8_t *restrict exponents, const uint8_t *restrict rest, size_t n, int kind, uint8_t *restrict raw)
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
STEP int choose(const uint8_t *exponents, size_t n, int *base)
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

STEP void differences(const uint8_t *restrict exponents, size_t n, int base, int escape, uint8_t *restrict codes)
{
    for (size_t i = 0; i < n; i++) {
        const uint8_t code = exponents[i] - base;
        codes[i] = code < escape ? code : escape;
    }
    memset(codes + n, 0, 8);
}

static size_t raw_tile(const uint8_t *raw, size_t nbytes, uint8_t *out)
{
    out[0] = RAW;
    out[1] = out[2] = out[3] = 0;
    memcpy(out + HEAD, raw, nbytes);
    return HEAD + nbytes;
}

STEP size_t encode_tile(const uint8_t *raw, size_t n, int kind, uint8_t *out)
{
    uint8_t exponents[TILE], codes[TILE + 8];
    const size_t whole = n * item_bytes(kind), rest = rest_bytes(n, kind), groups = words(n);
    int base = 0;
    split(raw, n, kind, exponents, out + HEAD);
    const int width = choose(exponents, n, &base), escape = (1 << width) - 1;
    uint64_t flags[TILE / 64];
    size_t escapes = 0;
    if (width) {
        differences(exponents, n, base, escape, codes);
        find(codes, groups, escape, flags);
        for (size_t at = 0; at < n; at += 64)
            escapes += __builtin_popcountll(flags[at / 64]);
    }
    if (rest + width * groups + escapes >= whole)
        return raw_tile(raw, whole, out);
    out[0] = width;
    out[1] = base;
    out[2] = escapes;
    out[3] = escapes >> 8;
    if (!width)
        return HEAD + rest;
    pack(codes, groups, width, out + HEAD + rest);
    uint8_t *next = out + HEAD + rest + width * groups;
    for (size_t at = 0; at < n; at += 64)
        for (uint64_t t = flags[at / 64]; t; t &= t - 1)
            *next++ = exponents[at + __builtin_ctzll(t)];
    return next - out;
}

/* Writes n elements; *used becomes the bytes of the tile. */
STEP int decode_tile(const uint8_t *coded, size_t room, size_t n, int kind, uint8_t *raw, size_t *used)
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
        uint64_t flags[TILE / 64];
        unpack(coded + HEAD + rest, groups, width, exponents);
        find(exponents, groups, escape, flags);
        for (size_t at = 0; at < n; at += 64)
            for (uint64_t t = flags[at / 64]; t; t &= t - 1) {
                if (found == escapes)
                    return BAD_ESCAPES;
                places[found++] = at + __builtin_ctzll(t);
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

/* Codes `nbytes` bytes into out, which has bound(nbytes) bytes; returns the bytes written, 0 for an unknown kind. */
size_t encode(const uint8_t *raw, size_t nbytes, int kind, uint8_t *out)
{
    const size_t item = item_bytes(kind);
    if (!item)
        return 0;
    const size_t count = nbytes / item, odd = nbytes - count * item;
    uint8_t *next = out;
    for (size_t i = 0; i < count; i += TILE)
        next += encode_tile(raw + i * item, count - i < TILE ? count - i : TILE, kind, next);
    memcpy(next, raw + count * item, odd);
    return next + odd - out;
}

/* Decodes `nbytes` bytes into raw, which has exactly raw_bytes bytes; returns FINE or the damage that was found. */
int decode(const uint8_t *coded, size_t nbytes, int kind, uint8_t *raw, size_t raw_bytes)
{
    const size_t item = item_bytes(kind);
    if (!item)
        return BAD_KIND;
    const size_t count = raw_bytes / item, odd = raw_bytes - count * item;
    size_t at = 0;
    for (size_t i = 0; i < count; i += TILE) {
        const size_t n = count - i < TILE ? count - i : TILE;
        size_t used = 0;
        const int why = decode_tile(coded + at, nbytes - at, n, kind, raw + i * item, &used);
        if (why != FINE)
            return why;
        at += used;
    }
    if (nbytes - at != odd)
        return nbytes - at < odd ? TRUNCATED : TOO_LONG;
    memcpy(raw + count * item, coded + at, odd);
    return FINE;
}
