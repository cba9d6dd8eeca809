// Reductions over the tensors of several ranks: sum, mean, product, minimum, maximum, bits; one pass over every input.
// float16 and bfloat16 are summed in float32 and rounded once.

#include <stdint.h>
#include <string.h>

enum { OK = 0, CHANGED = 1, MISMATCH = 2, UNSUPPORTED = 3 };
enum { SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR };                            // net/collectives/plan.py: OPS
enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT8, UINT8, INT16, INT32, INT64, BOOL };  // net/collectives/plan.py: DTYPES

static inline float from_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_bfloat16(float value) {  // rounds to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

#define SAME(x) (x)

#define NAME float32
#define TYPE float
#define ACC float
#define LOAD SAME
#define STORE SAME
#define DIVIDES 1
#define BITS 0
#include "reduce_type.h"

#define NAME float64
#define TYPE double
#define ACC double
#define LOAD SAME
#define STORE SAME
#define DIVIDES 1
#define BITS 0
#include "reduce_type.h"

#define NAME float16
#define TYPE _Float16
#define ACC float
#define LOAD(x) ((float)(x))
#define STORE(x) ((_Float16)(x))
#define DIVIDES 1
#define BITS 0
#include "reduce_type.h"

#define NAME bfloat16
#define TYPE uint16_t
#define ACC float
#define LOAD from_bfloat16
#define STORE to_bfloat16
#define DIVIDES 1
#define BITS 0
#include "reduce_type.h"

#define NAME int8
#define TYPE int8_t
#define ACC int8_t
#define LOAD SAME
#define STORE SAME
#define DIVIDES 0
#define BITS 1
#include "reduce_type.h"

#define NAME uint8
#define TYPE uint8_t
#define ACC uint8_t
#define LOAD SAME
#define STORE SAME
#define DIVIDES 0
#define BITS 1
#include "reduce_type.h"

#define NAME int16
#define TYPE int16_t
#define ACC int16_t
#define LOAD SAME
#define STORE SAME
#define DIVIDES 0
#define BITS 1
#include "reduce_type.h"

#define NAME int32
#define TYPE int32_t
#define ACC int32_t
#define LOAD SAME
#define STORE SAME
#define DIVIDES 0
#define BITS 1
#include "reduce_type.h"

#define NAME int64
#define TYPE int64_t
#define ACC int64_t
#define LOAD SAME
#define STORE SAME
#define DIVIDES 0
#define BITS 1
#include "reduce_type.h"

#define NAME bool  // a sum is true where any rank is, and at most 64 ranks add up
#define TYPE uint8_t
#define ACC uint8_t
#define LOAD(x) ((uint8_t)((x) != 0))
#define STORE(x) ((uint8_t)((x) != 0))
#define DIVIDES 0
#define BITS 1
#include "reduce_type.h"

static const int64_t WIDTHS[] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1};  // bytes per element

static int reduce(void *to, const void *const *from, int count, int64_t n, int dtype, int op) {
    switch (dtype) {
    case FLOAT32: return reduce_float32(to, from, count, n, op);
    case FLOAT64: return reduce_float64(to, from, count, n, op);
    case FLOAT16: return reduce_float16(to, from, count, n, op);
    case BFLOAT16: return reduce_bfloat16(to, from, count, n, op);
    case INT8: return reduce_int8(to, from, count, n, op);
    case UINT8: return reduce_uint8(to, from, count, n, op);
    case INT16: return reduce_int16(to, from, count, n, op);
    case INT32: return reduce_int32(to, from, count, n, op);
    case INT64: return reduce_int64(to, from, count, n, op);
    case BOOL: return reduce_bool(to, from, count, n, op);
    }
    return UNSUPPORTED;
}
