// Rows of a message: elements of three types, codes of one byte, sums in float32

enum { FLOAT32, FLOAT16, BFLOAT16 };  // net/rounds/layout.py: TYPES
enum { ELEMENTS, INT8, FP8 };         // net/rounds/layout.py: CODES
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

// The largest |x|; NaN or infinity if one is among them. Bits without the sign are in the order of the sizes.
static float largest_of(const float *x, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float largest;
    memcpy(&largest, &most, 4);
    return largest;
}

// E4M3 (OCP, finite values only): sign, 4 bits of exponent with bias 7, 3 of mantissa. |value| <= 448. Rounds to
// nearest, ties to even. Below 2^-6 the step is 2^-9, which is that of float32 at 2^14.
static inline uint8_t to_e4m3(float value) {
    uint32_t bits, shifted;
    memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    float small;
    memcpy(&small, &size, 4);
    small += 16384.0f;
    memcpy(&shifted, &small, 4);
    const uint32_t subnormal = shifted - 0x46800000;
    const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    return (uint8_t)(sign | (size < 0x3c800000 ? subnormal : normal));
}

static inline float from_e4m3(uint8_t code) {
    const uint32_t size = code & 0x7f, bits = (size << 20) + (120u << 23);
    float normal;
    memcpy(&normal, &bits, 4);
    const float value = size < 8 ? (float)size * 0x1p-9f : normal;
    return code & 0x80 ? -value : value;
}

// Codes c with x = s c, the largest |c| being 127 or, of E4M3, 448; rounded to nearest. Returns s; a row of zeros has
// s = 0. Of a row with NaN or infinity s is NaN, and so are all elements that are read from it.
static float to_codes(const float *x, uint8_t *codes, int64_t count, int coded) {
    const float most = coded == INT8 ? 127 : 448, largest = largest_of(x, count), inverse = largest > 0 ? most / largest : 0;
    if (!(largest <= 0x1.fffffep127f)) {
        memset(codes, 0, count);
        return __builtin_nanf("");
    }
    if (coded == INT8) {
        for (int64_t i = 0; i < count; i++) {
            float scaled = x[i] * inverse;
            codes[i] = (uint8_t)(int8_t)(scaled < 0 ? scaled - 0.5f : scaled + 0.5f);
        }
    } else {
        for (int64_t i = 0; i < count; i++) {
            float scaled = x[i] * inverse;
            scaled = scaled > 448 ? 448 : scaled < -448 ? -448 : scaled;
            codes[i] = to_e4m3(scaled);
        }
    }
    return largest / most;
}

static void from_codes(const uint8_t *codes, float scale, float *x, int64_t count, int coded) {
    if (coded == INT8)
        for (int64_t i = 0; i < count; i++) x[i] = scale * (int8_t)codes[i];
    else
        for (int64_t i = 0; i < count; i++) x[i] = scale * from_e4m3(codes[i]);
}
