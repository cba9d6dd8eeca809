/* The chained keys of a prompt's blocks: key = BLAKE2b-128(parent key | token ids), RFC 7693, without a secret.
   Produces the same bytes as cache/block.py with hashlib, in one call instead of one per block. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KEY_BYTES 16
#define CHUNK 128

/* Rotations that keep their source (BMI2) are a fifth faster: if the compiler supports it, it builds both versions and
   the loader selects the one for this machine. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define FASTEST __attribute__((target_clones("default", "arch=x86-64-v3")))
#define INSIDE static inline __attribute__((always_inline))
#else
#define FASTEST
#define INSIDE static inline
#endif

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static inline uint64_t rotr(uint64_t x, int n) { return x >> n | x << (64 - n); }

#define G(a, b, c, d, x, y)                                                                                          \
    do {                                                                                                             \
        a += b + (x); d = rotr(d ^ a, 32); c += d; b = rotr(b ^ c, 24);                                              \
        a += b + (y); d = rotr(d ^ a, 16); c += d; b = rotr(b ^ c, 63);                                              \
    } while (0)

/* One round with the message words in the order of its permutation. */
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, sa, sb, sc, sd, se, sf)                                        \
    do {                                                                                                             \
        G(v0, v4, v8, vc, m[s0], m[s1]); G(v1, v5, v9, vd, m[s2], m[s3]);                                            \
        G(v2, v6, va, ve, m[s4], m[s5]); G(v3, v7, vb, vf, m[s6], m[s7]);                                            \
        G(v0, v5, va, vf, m[s8], m[s9]); G(v1, v6, vb, vc, m[sa], m[sb]);                                            \
        G(v2, v7, v8, vd, m[sc], m[sd]); G(v3, v4, v9, ve, m[se], m[sf]);                                            \
    } while (0)

/* Section 3.2 of the RFC: mix one chunk into the state h; `count` bytes have been hashed with it. The words of the
   chunk have the machine's byte order, so this works on little-endian machines only: see key_chain_order. */
INSIDE void compress(uint64_t h[8], const uint64_t m[16], uint64_t count, int last) {
    uint64_t v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3], v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
    uint64_t v8 = IV[0], v9 = IV[1], va = IV[2], vb = IV[3];
    uint64_t vc = IV[4] ^ count, vd = IV[5], ve = last ? ~IV[6] : IV[6], vf = IV[7];
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
    ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);
    ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);
    ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);
    ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);
    ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);
    ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);
    ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);
    ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
    h[0] ^= v0 ^ v8; h[1] ^= v1 ^ v9; h[2] ^= v2 ^ va; h[3] ^= v3 ^ vb;
    h[4] ^= v4 ^ vc; h[5] ^= v5 ^ vd; h[6] ^= v6 ^ ve; h[7] ^= v7 ^ vf;
}

#define BEGIN(h)                                                                                                     \
    uint64_t h[8];                                                                                                   \
    memcpy(h, IV, sizeof h);                                                                                         \
    h[0] ^= 0x01010000 ^ KEY_BYTES /* parameter block: digest length, no key, one leaf */

/* A block of 16 tokens is one chunk with six words of zeros; knowing this, the compiler saves a tenth of the work. */
INSIDE void key_of_16(const uint8_t *parent, const uint8_t *content, uint8_t *key) {
    BEGIN(h);
    uint64_t m[16] = {0};
    memcpy(m, parent, KEY_BYTES);
    memcpy(m + 2, content, 64);
    compress(h, m, KEY_BYTES + 64, 1);
    memcpy(key, h, KEY_BYTES);
}

/* The same with the four G of half a round in one register, where rotations are single instructions (AVX-512). It waits
   for one instruction after the other, so a core whose other hyperthread is busy makes keys as fast as an idle core.
   The code above keeps all units of a core busy and takes a quarter longer there. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define WIDE 1
int key_chain_wide = 1; /* 0: not used even where the CPU could; for tests */

typedef uint64_t four __attribute__((vector_size(32)));
typedef uint64_t eight __attribute__((vector_size(64)));

/* The place of a message word: the words of the tokens, 2 to 9, are lanes 0 to 7; the parent's, 0 and 1, are lanes 8
   and 9, and zeros follow. */
#define LANE(word) ((word) < 2 ? 8 + (word) : (word) < 10 ? (word) - 2 : (word))
#define WORDS(w0, w1, w2, w3, w4, w5, w6, w7)                                                                        \
    __builtin_shuffle(content, parent,                                                                               \
                      (eight){LANE(w0), LANE(w1), LANE(w2), LANE(w3), LANE(w4), LANE(w5), LANE(w6), LANE(w7)})
#define LOW(x) __builtin_shufflevector(x, x, 0, 1, 2, 3)
#define HIGH(x) __builtin_shufflevector(x, x, 4, 5, 6, 7)
#define ROTATED(x, n) ((x) >> (n) | (x) << (64 - (n)))

#define FOUR_G(x, y)                                                                                                 \
    do {                                                                                                             \
        a = (a + (x)) + b; d = ROTATED(d ^ a, 32); c += d; b = ROTATED(b ^ c, 24);                                   \
        a = (a + (y)) + b; d = ROTATED(d ^ a, 16); c += d; b = ROTATED(b ^ c, 63);                                   \
    } while (0)

/* The diagonals become columns by a turn of a, c and d: b, the last to be known, stays in place. */
#define WIDE_ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, sa, sb, sc, sd, se, sf)                                   \
    do {                                                                                                             \
        eight words = WORDS(s0, s2, s4, s6, s1, s3, s5, s7);                                                         \
        FOUR_G(LOW(words), HIGH(words));                                                                             \
        a = __builtin_shufflevector(a, a, 3, 0, 1, 2);                                                               \
        c = __builtin_shufflevector(c, c, 1, 2, 3, 0);                                                               \
        d = __builtin_shufflevector(d, d, 2, 3, 0, 1);                                                               \
        words = WORDS(se, s8, sa, sc, sf, s9, sb, sd);                                                               \
        FOUR_G(LOW(words), HIGH(words));                                                                             \
        a = __builtin_shufflevector(a, a, 1, 2, 3, 0);                                                               \
        c = __builtin_shufflevector(c, c, 3, 0, 1, 2);                                                               \
        d = __builtin_shufflevector(d, d, 2, 3, 0, 1);                                                               \
    } while (0)

__attribute__((target("avx512f,avx512vl"))) static void wide_chain_of_16(const uint8_t *root, const uint8_t *tokens,
                                                                          size_t num_blocks, uint8_t *keys) {
    const four begin = {IV[0] ^ 0x01010000 ^ KEY_BYTES, IV[1], IV[2], IV[3]}, iv_low = {IV[0], IV[1], IV[2], IV[3]};
    const four iv_mid = {IV[4], IV[5], IV[6], IV[7]};
    const four iv_high = {IV[4] ^ (KEY_BYTES + 64), IV[5], ~IV[6], IV[7]}; /* 80 bytes, the last chunk */
    eight parent = {0};
    memcpy(&parent, root, KEY_BYTES);
    for (size_t block = 0; block < num_blocks; block++, tokens += 64, keys += KEY_BYTES) {
        four a = begin, b = iv_mid, c = iv_low, d = iv_high;
        eight content;
        memcpy(&content, tokens, sizeof content);
        WIDE_ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        WIDE_ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
        WIDE_ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);
        WIDE_ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);
        WIDE_ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);
        WIDE_ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);
        WIDE_ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);
        WIDE_ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);
        WIDE_ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);
        WIDE_ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);
        WIDE_ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        WIDE_ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
        a ^= begin ^ c;
        parent = (eight){a[0], a[1]};
        memcpy(keys, &a, KEY_BYTES);
    }
}
#endif

INSIDE void key_of(const uint8_t *parent, const uint8_t *content, size_t block_bytes, uint8_t *key) {
    BEGIN(h);
    uint64_t m[16] = {0};
    size_t total = KEY_BYTES + block_bytes, done = total < CHUNK ? total : CHUNK;
    memcpy(m, parent, KEY_BYTES);
    memcpy(m + 2, content, done - KEY_BYTES);
    compress(h, m, done, done == total);
    while (done < total) {
        size_t take = total - done < CHUNK ? total - done : CHUNK;
        memset(m, 0, sizeof m);
        memcpy(m, content + done - KEY_BYTES, take);
        done += take;
        compress(h, m, done, done == total);
    }
    memcpy(key, h, KEY_BYTES);
}

/* keys[16 i .. 16 i + 15] = key of block i. tokens: uint32, num_blocks * block_size of them. */
FASTEST void key_chain(const uint8_t root[KEY_BYTES], const uint32_t *tokens, size_t block_size, size_t num_blocks,
               uint8_t *keys) {
    const uint8_t *parent = root, *content = (const uint8_t *)tokens;
    size_t block_bytes = 4 * block_size;
#ifdef WIDE
    int able = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
    if (able && key_chain_wide && block_bytes == 64) {
        wide_chain_of_16(root, (const uint8_t *)tokens, num_blocks, keys);
        return;
    }
#endif
    for (size_t block = 0; block < num_blocks; block++, content += block_bytes, keys += KEY_BYTES) {
        if (block_bytes == 64)
            key_of_16(parent, content, keys);
        else
            key_of(parent, content, block_bytes, keys);
        parent = keys;
    }
}

/* 1 if this machine's byte order suits the code above. */
int key_chain_order(void) {
    const uint16_t one = 1;
    return *(const uint8_t *)&one;
}
