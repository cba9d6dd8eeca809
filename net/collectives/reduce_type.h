// The reductions of one element type. reduce.h includes this file once per type, with these macros defined:
//   NAME    suffix of the functions          TYPE   the type in memory        ACC   the type of the sums
//   LOAD(x) TYPE -> ACC                      STORE(x) ACC -> TYPE             DIVIDES, BITS: whether avg, and/or/xor exist

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define EACH(statement)             \
    for (int64_t i = 0; i < n; i++) { \
        ACC v = LOAD(from[i]);      \
        statement;                  \
    }                               \
    break

static void CAT(fold_, NAME)(ACC *restrict sum, const TYPE *restrict from, int64_t n, int op) {
    switch (op) {
    case SUM:
    case AVG: EACH(sum[i] += v);
    case PRODUCT: EACH(sum[i] *= v);
    case MIN: EACH(sum[i] = v < sum[i] ? v : sum[i]);
    case MAX: EACH(sum[i] = v > sum[i] ? v : sum[i]);
#if BITS
    case BAND: EACH(sum[i] &= v);
    case BOR: EACH(sum[i] |= v);
    case BXOR: EACH(sum[i] ^= v);
#endif
    }
}

// to[i] = from[0][i] op from[1][i] op ...: in the order of the ranks, so every rank that computes it gets the same bits.
// A block of sums stays in the first-level cache, and each input is read once. `to` may be one of the inputs.
static int CAT(reduce_, NAME)(void *to_, const void *const *from, int count, int64_t n, int op) {
    enum { BLOCK = 1024 };
    ACC sum[BLOCK] __attribute__((aligned(64)));
    TYPE *to = to_;
    if (op == AVG ? !DIVIDES : op >= BAND && !BITS) return UNSUPPORTED;
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t length = n - at < BLOCK ? n - at : BLOCK;
        const TYPE *first = (const TYPE *)from[0] + at;
        for (int64_t i = 0; i < length; i++) sum[i] = LOAD(first[i]);
        for (int k = 1; k < count; k++) CAT(fold_, NAME)(sum, (const TYPE *)from[k] + at, length, op);
#if DIVIDES
        if (op == AVG)
            for (int64_t i = 0; i < length; i++) sum[i] /= (ACC)count;
#endif
        for (int64_t i = 0; i < length; i++) to[at + i] = STORE(sum[i]);
    }
    return OK;
}

#undef EACH
#undef CAT
#undef CAT_
#undef NAME
#undef TYPE
#undef ACC
#undef LOAD
#undef STORE
#undef DIVIDES
#undef BITS
