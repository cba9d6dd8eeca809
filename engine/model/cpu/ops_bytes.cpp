// The operations of weights of one byte with float32 scales at every level, for one type of elements (-DELEMENT).
#include "bytes.h"
#include "ops.h"

extern "C" {

// Bytes that pack_bytes needs for each output of k inputs.
int32_t packed_bytes(int64_t kind, int64_t k) { return packed_bytes_of(kind, k); }

// q [n, k] and scales [n, 1] (S8) or [n, ceil(k / 128)] (E4M3) -> packed, whose memory is zeros. gated: as pack.
void pack_bytes(const uint8_t* q, const float* scales, int64_t n, int64_t k, int64_t kind, int32_t gated,
                uint8_t* packed, int32_t threads) {
    const Weight w{(const Element*)packed, nullptr, n, k, kind};
    const int64_t columns = gated ? n / 2 : n, wide = gated ? WIDTH : OUTPUTS;
    const int64_t groups = kind == S8 ? 1 : (k + SHARED - 1) / SHARED;
    team(threads, [&](int index, int count) {
        const Range mine = share(columns, wide, index, count);  // whole blocks
        for (int64_t row = 0; row < n; row++) {
            const int64_t column = row % columns, half = row / columns;
            if (column < mine.begin || column >= mine.end) continue;
            const int64_t output = column / wide * OUTPUTS + half * WIDTH + column % wide;
            pack_bytes_of(w, q + row * k, scales + row * groups, output);
        }
    });
}

}  // extern "C"
