/* Copies blocks out of memory that others may change, and compares them with their checksum in the same pass. It finds
   the blocks in a SharedIndex (cache/index/shared_index.py). Also copies blocks into memory that others read later, and
   computes their checksums in that pass; with blocks in pieces, into slots that their owner has lent
   (cache/index/loans.py). The checksum is XXH3-64: the pass hashes the registers that it stores, while
   the next bytes arrive from memory. A copy alone is no faster. The hash is XXH3 as specified, without a seed; the tests
   compare it with the xxhash package. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define KEY_BYTES 16
#define ROWS 8
#define SHORT 240           /* bytes: XXH3 uses other functions up to this length; this file lacks them */
#define STREAM_MIN (64 << 10) /* bytes: from here on stores bypass the caches, so no old line is read */
#define AHEAD 1024          /* bytes: distance of the prefetch */
#define STRIPE 64
#define CHUNK 1024          /* bytes between two scrambles of the accumulators */

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull

typedef struct {
    uint8_t key[KEY_BYTES];
    uint64_t mixed; /* checksum xor hash of the key */
    uint32_t slot, length;
} Row;

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d,
    0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0,
    0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0,
    0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b,
    0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac,
    0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51,
    0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49,
    0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8,
    0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b,
    0x40, 0x7e,
};

static inline uint64_t word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Both halves of the product of two 64-bit numbers, folded. */
static inline uint64_t fold(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9ull;
    return hash ^ hash >> 32;
}

static uint64_t key_hash(const uint8_t key[KEY_BYTES]) {
    uint64_t low = word(key) ^ word(SECRET + 24) ^ word(SECRET + 32);
    uint64_t high = word(key + 8) ^ word(SECRET + 40) ^ word(SECRET + 48);
    return avalanche(KEY_BYTES + __builtin_bswap64(low) + high + fold(low, high));
}

/* acc[0..7] as two vectors. */
typedef struct {
    __m256i low, high;
} Acc;

static inline AVX2 __m256i mixed(__m256i acc, __m256i data, const uint8_t *secret) {
    __m256i key = _mm256_xor_si256(data, _mm256_loadu_si256((const void *)secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_shuffle_epi32(key, _MM_SHUFFLE(0, 3, 0, 1)));
    return _mm256_add_epi64(acc, _mm256_add_epi64(product, _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2))));
}

static inline AVX2 void mix(Acc *acc, __m256i low, __m256i high, const uint8_t *secret) {
    acc->low = mixed(acc->low, low, secret);
    acc->high = mixed(acc->high, high, secret + 32);
}

static inline AVX2 void mix_at(Acc *acc, const uint8_t *data, const uint8_t *secret) {
    mix(acc, _mm256_loadu_si256((const void *)data), _mm256_loadu_si256((const void *)(data + 32)), secret);
}

static inline AVX2 __m256i scrambled(__m256i acc, const uint8_t *secret) {
    __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    acc = _mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47));
    acc = _mm256_xor_si256(acc, _mm256_loadu_si256((const void *)secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(acc, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(acc, prime), _mm256_slli_epi64(high, 32));
}

/* Copies all whole chunks of a block except the last; `stream`: past the caches, to 32-byte boundaries. */
static inline AVX2 __attribute__((always_inline)) void chunks(Acc *acc, uint8_t *to, const uint8_t *from, size_t count,
                                                             int stream) {
    for (; count; count--) {
        for (const uint8_t *secret = SECRET; secret < SECRET + 8 * (CHUNK / STRIPE); secret += 8) {
            _mm_prefetch((const char *)(from + AHEAD), _MM_HINT_T0);
            __m256i low = _mm256_loadu_si256((const void *)from), high = _mm256_loadu_si256((const void *)(from + 32));
            if (stream) {
                _mm256_stream_si256((void *)to, low);
                _mm256_stream_si256((void *)(to + 32), high);
            } else {
                _mm256_storeu_si256((void *)to, low);
                _mm256_storeu_si256((void *)(to + 32), high);
            }
            mix(acc, low, high, secret);
            from += STRIPE;
            to += STRIPE;
        }
        acc->low = scrambled(acc->low, SECRET + 128);
        acc->high = scrambled(acc->high, SECRET + 160);
    }
}

static inline AVX2 Acc fresh(void) {
    Acc acc = {_mm256_set_epi64x(PRIME64_3, PRIME64_2, PRIME64_1, PRIME32_3),
               _mm256_set_epi64x(PRIME32_1, PRIME64_5, PRIME32_2, PRIME64_4)};
    return acc;
}

/* The hash of the `nbytes` at `to`, whose whole chunks except the last are in `acc`. */
static AVX2 uint64_t finished(Acc acc, const uint8_t *to, size_t nbytes) {
    size_t whole = (nbytes - 1) / CHUNK, rest = nbytes - whole * CHUNK;
    const uint8_t *last = to + whole * CHUNK;
    for (size_t i = 0; i < (rest - 1) / STRIPE; i++) mix_at(&acc, last + STRIPE * i, SECRET + 8 * i);
    mix_at(&acc, to + nbytes - STRIPE, SECRET + 121);
    uint64_t sums[8], hash = nbytes * PRIME64_1;
    _mm256_storeu_si256((void *)sums, acc.low);
    _mm256_storeu_si256((void *)(sums + 4), acc.high);
    for (int i = 0; i < 4; i++)
        hash += fold(sums[2 * i] ^ word(SECRET + 11 + 16 * i), sums[2 * i + 1] ^ word(SECRET + 19 + 16 * i));
    return avalanche(hash);
}

/* Copies more than SHORT bytes; returns the XXH3-64 of the copy at `to`. */
AVX2 uint64_t copy_and_hash(uint8_t *to, const uint8_t *from, size_t nbytes) {
    Acc acc = fresh();
    size_t whole = (nbytes - 1) / CHUNK, rest = nbytes - whole * CHUNK;
    if (nbytes >= STREAM_MIN && (uintptr_t)to % 32 == 0) {
        chunks(&acc, to, from, whole, 1);
        _mm_sfence();
    } else {
        chunks(&acc, to, from, whole, 0);
    }
    memcpy(to + whole * CHUNK, from + whole * CHUNK, rest);
    return finished(acc, to, nbytes);
}

/* A place in bytes that lie in pieces. */
typedef struct {
    const uint64_t *addresses, *lengths;
    const uint8_t *at;
    size_t left; /* of this piece */
} Place;

/* The next piece with bytes; there is one. */
static inline void to_bytes(Place *place) {
    while (!place->left) {
        place->at = (const uint8_t *)(uintptr_t)*++place->addresses;
        place->left = *++place->lengths;
    }
}

static void gather(Place *place, uint8_t *to, size_t nbytes) {
    while (nbytes) {
        to_bytes(place);
        size_t count = place->left < nbytes ? place->left : nbytes;
        memcpy(to, place->at, count);
        place->at += count;
        place->left -= count;
        to += count;
        nbytes -= count;
    }
}

/* The same for `nbytes` in pieces. A chunk that lies in more than one piece is hashed after it was copied. */
static AVX2 uint64_t gather_and_hash(uint8_t *to, const uint64_t *addresses, const uint64_t *lengths, size_t nbytes) {
    Acc acc = fresh();
    Place place = {addresses, lengths, (const uint8_t *)(uintptr_t)*addresses, *lengths};
    int stream = nbytes >= STREAM_MIN && (uintptr_t)to % 32 == 0;
    uint8_t *at = to;
    for (size_t whole = (nbytes - 1) / CHUNK; whole;) {
        to_bytes(&place);
        size_t run = place.left / CHUNK;
        if (run > whole) run = whole;
        if (run) {
            chunks(&acc, at, place.at, run, stream);
            place.at += run * CHUNK;
            place.left -= run * CHUNK;
        } else {
            run = 1;
            gather(&place, at, CHUNK);
            chunks(&acc, at, at, 1, 0);
        }
        at += run * CHUNK;
        whole -= run;
    }
    gather(&place, at, (size_t)(to + nbytes - at));
    if (stream) _mm_sfence();
    return finished(acc, to, nbytes);
}

/* A row of cache/index/loans.py. */
typedef struct {
    uint64_t state; /* FREE, LENT, or the number of the announcement */
    uint32_t slot, length;
    uint8_t key[KEY_BYTES];
    uint64_t checksum;
} Loan;

/* What all rows share. */
typedef struct {
    uint64_t next_number, announced, mood;
} LoanHead;

/* Copies a block of `nbytes` in pieces, more than SHORT, into the slot `to` that `row` lends, and announces it to the
   owner. Returns the owner's mood after that. */
AVX2 uint64_t fill_loan(LoanHead *head, Loan *row, uint8_t *to, const uint64_t *addresses, const uint64_t *lengths,
                        size_t nbytes, const uint8_t *key) {
    row->checksum = gather_and_hash(to, addresses, lengths, nbytes);
    row->length = (uint32_t)nbytes;
    memcpy(row->key, key, KEY_BYTES);
    uint64_t number = __atomic_fetch_add(&head->next_number, 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&row->state, number, __ATOMIC_SEQ_CST); /* the block is complete: readers follow this word */
    __atomic_fetch_add(&head->announced, 1, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&head->mood, __ATOMIC_SEQ_CST);
}

/* keys: 16 bytes each; targets: addresses with room for slot_bytes. lengths[i] becomes the bytes of block i if its copy
   is intact, else 0; then the bytes at its target are undefined. */
void read_blocks(const Row *buckets, uint64_t num_buckets, const uint8_t *arena, uint64_t arena_bytes,
                 uint64_t slot_bytes, const uint8_t *keys, size_t count, const uint64_t *targets, uint32_t *lengths) {
    for (size_t i = 0; i < count; i++, keys += KEY_BYTES) {
        uint64_t hashed = key_hash(keys);
        const Row *bucket = buckets + hashed % num_buckets * ROWS;
        lengths[i] = 0;
        for (int j = 0; j < ROWS; j++) {
            Row row;
            memcpy(&row, bucket + j, sizeof row); /* a snapshot; it may mix two rows */
            if (memcmp(row.key, keys, KEY_BYTES) || row.length <= SHORT || row.length > slot_bytes ||
                (row.slot + 1ull) * slot_bytes > arena_bytes)
                continue;
            uint8_t *to = (uint8_t *)(uintptr_t)targets[i];
            if (copy_and_hash(to, arena + row.slot * slot_bytes, row.length) == (row.mixed ^ hashed))
                lengths[i] = row.length;
            break;
        }
    }
}

/* Copies block i from the address sources[i] to targets[i]; sums[i] becomes its checksum, or 0 if it has at most SHORT
   bytes. */
void copy_blocks(const uint64_t *sources, const uint64_t *targets, const uint64_t *lengths, size_t count,
                 uint64_t *sums) {
    for (size_t i = 0; i < count; i++) {
        uint8_t *to = (uint8_t *)(uintptr_t)targets[i];
        const uint8_t *from = (const uint8_t *)(uintptr_t)sources[i];
        sums[i] = 0;
        if (lengths[i] > SHORT)
            sums[i] = copy_and_hash(to, from, lengths[i]);
        else
            memcpy(to, from, lengths[i]);
    }
}

/* 1 if this CPU can run the code above. */
int usable(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
}
#else
int usable(void) { return 0; }
#endif
