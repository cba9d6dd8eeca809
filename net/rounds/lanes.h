// Lanes: the float32 numbers of one register, read from and written to elements of three types. LANES is 1 without AVX2.
//
// `stream`: past the caches, for what is larger than they are and read much later. Such a store needs an aligned
// address; who uses it ends with stream_end().

#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16 };
typedef __m512 Lanes;

static inline Lanes lanes_zero(void) { return _mm512_setzero_ps(); }
static inline Lanes lanes_add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }

static inline __attribute__((always_inline)) Lanes lanes_load(const void *from, int type) {
    if (type == FLOAT32) return _mm512_loadu_ps(from);
    const __m256i half = _mm256_loadu_si256(from);
    if (type == FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline __m256i lanes_bfloat16(Lanes value) {  // as to_bfloat16
    const __m512i bits = _mm512_castps_si512(value), high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __mmask16 nan = _mm512_cmpgt_epi32_mask(size, _mm512_set1_epi32(0x7f800000));
    rounded = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(rounded);
}

static inline __attribute__((always_inline)) void lanes_store(void *to, Lanes value, int type, int stream) {
    if (type == FLOAT32) {
        if (stream)
            _mm512_stream_ps(to, value);
        else
            _mm512_storeu_ps(to, value);
        return;
    }
    const __m256i half = type == FLOAT16 ? _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT) : lanes_bfloat16(value);
    if (stream)
        _mm256_stream_si256(to, half);
    else
        _mm256_storeu_si256(to, half);
}

#elif defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
enum { LANES = 8 };
typedef __m256 Lanes;

static inline Lanes lanes_zero(void) { return _mm256_setzero_ps(); }
static inline Lanes lanes_add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }

static inline __attribute__((always_inline)) Lanes lanes_load(const void *from, int type) {
    if (type == FLOAT32) return _mm256_loadu_ps(from);
    const __m128i half = _mm_loadu_si128(from);
    if (type == FLOAT16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

static inline __m128i lanes_bfloat16(Lanes value) {  // as to_bfloat16
    const __m256i bits = _mm256_castps_si256(value), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i nan = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7f800000));
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
    const __m256i packed = _mm256_packus_epi32(rounded, rounded);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

static inline __attribute__((always_inline)) void lanes_store(void *to, Lanes value, int type, int stream) {
    if (type == FLOAT32) {
        if (stream)
            _mm256_stream_ps(to, value);
        else
            _mm256_storeu_ps(to, value);
        return;
    }
    const __m128i half = type == FLOAT16 ? _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT) : lanes_bfloat16(value);
    if (stream)
        _mm_stream_si128(to, half);
    else
        _mm_storeu_si128(to, half);
}

#else
enum { LANES = 1 };
typedef float Lanes;

static inline Lanes lanes_zero(void) { return 0; }
static inline Lanes lanes_add(Lanes a, Lanes b) { return a + b; }

static inline Lanes lanes_load(const void *from, int type) {
    Lanes value;
    widen(from, &value, 1, type);
    return value;
}

static inline void lanes_store(void *to, Lanes value, int type, int stream) {
    (void)stream;
    narrow(&value, to, 1, type);
}
#endif

static inline int aligned(const void *at, int64_t row_bytes) { return ((uintptr_t)at | (uintptr_t)row_bytes) % 64 == 0; }

// A row of `nbytes`; with `stream`, both ends of it are aligned.
static inline void copy_row(void *to, const void *from, int64_t nbytes, int stream) {
#if defined(__AVX2__)
    if (stream) {
        for (int64_t i = 0; i < nbytes; i += 64) {
            const __m256i low = _mm256_loadu_si256((const void *)((const char *)from + i));
            const __m256i high = _mm256_loadu_si256((const void *)((const char *)from + i + 32));
            _mm256_stream_si256((void *)((char *)to + i), low);
            _mm256_stream_si256((void *)((char *)to + i + 32), high);
        }
        return;
    }
#endif
    (void)stream;
    memcpy(to, from, nbytes);
}

static inline void stream_end(void) {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// out[i] = base[i] + from[0][i] + ... , the terms in this order, in float32. base: [count] float32, or NULL.
static inline __attribute__((always_inline)) void sum_typed(
    const float *base, const uint8_t *const *from, int64_t terms, uint8_t *out, int64_t count, int type, int into,
    int stream) {
    const int64_t width = type == FLOAT32 ? 4 : 2, into_width = into == FLOAT32 ? 4 : 2;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Lanes sum = base ? lanes_load(base + i, FLOAT32) : lanes_zero();
        for (int64_t t = 0; t < terms; t++) sum = lanes_add(sum, lanes_load(from[t] + i * width, type));
        lanes_store(out + i * into_width, sum, into, stream);
    }
    for (; i < count; i++) {
        float sum = base ? base[i] : 0;
        for (int64_t t = 0; t < terms; t++) add(from[t] + i * width, &sum, 1, type);
        narrow(&sum, out + i * into_width, 1, into);
    }
}

// `into` is `type` or FLOAT32: ExpertGroup.compute refuses rows of other types.
static void sum_rows(
    const float *base, const uint8_t *const *from, int64_t terms, uint8_t *out, int64_t count, int type, int into,
    int stream) {
    if (type == FLOAT32)
        sum_typed(base, from, terms, out, count, FLOAT32, FLOAT32, stream);
    else if (type == FLOAT16 && into == FLOAT16)
        sum_typed(base, from, terms, out, count, FLOAT16, FLOAT16, stream);
    else if (type == FLOAT16)
        sum_typed(base, from, terms, out, count, FLOAT16, FLOAT32, stream);
    else if (into == BFLOAT16)
        sum_typed(base, from, terms, out, count, BFLOAT16, BFLOAT16, stream);
    else
        sum_typed(base, from, terms, out, count, BFLOAT16, FLOAT32, stream);
}
