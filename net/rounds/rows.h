// Rows of a message: elements of three types, codes of one byte, sums in float32

enum { FLOAT32, FLOAT16, BFLOAT16 };  // net/rounds/layout.py: TYPES
enum { MOST_RANKS = 64, MOST_HIDDEN = 65536 };

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

static void widen(const void *from, float *to, int64_t count, int type) {
    if (type == FLOAT32) memcpy(to, from, count * 4);
    if (type == FLOAT16)
        for (int64_t i = 0; i < count; i++) to[i] = (float)((const _Float16 *)from)[i];
    if (type == BFLOAT16)
        for (int64_t i = 0; i < count; i++) to[i] = from_bfloat16(((const uint16_t *)from)[i]);
}

static void add(const void *from, float *to, int64_t count, int type) {
    if (type == FLOAT32)
        for (int64_t i = 0; i < count; i++) to[i] += ((const float *)from)[i];
    if (type == FLOAT16)
        for (int64_t i = 0; i < count; i++) to[i] += (float)((const _Float16 *)from)[i];
    if (type == BFLOAT16)
        for (int64_t i = 0; i < count; i++) to[i] += from_bfloat16(((const uint16_t *)from)[i]);
}

static void narrow(const float *from, void *to, int64_t count, int type) {
    if (type == FLOAT32) memcpy(to, from, count * 4);
    if (type == FLOAT16)
        for (int64_t i = 0; i < count; i++) ((_Float16 *)to)[i] = (_Float16)from[i];
    if (type == BFLOAT16)
        for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[i] = to_bfloat16(from[i]);
}

// Codes c with x = s c, s = max |x| / 127, rounded to nearest. Returns s; a row of zeros has s = 0.
static float to_codes(const float *x, int8_t *codes, int64_t count) {
    float largest = 0;
    for (int64_t i = 0; i < count; i++) {
        float size = x[i] < 0 ? -x[i] : x[i];
        largest = size > largest ? size : largest;
    }
    float inverse = largest > 0 ? 127 / largest : 0;
    for (int64_t i = 0; i < count; i++) {
        float scaled = x[i] * inverse;
        codes[i] = (int8_t)(scaled < 0 ? scaled - 0.5f : scaled + 0.5f);
    }
    return largest / 127;
}

static void from_codes(const int8_t *codes, float scale, float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = scale * codes[i];
}
