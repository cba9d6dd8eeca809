// The operations at levels without tiles, for one type of elements, and of quantized weights at every level. The type
// is -DELEMENT.
#include "groups.h"
#include "ops.h"

extern "C" {

// Bytes that pack_groups needs for each output of k inputs.
int32_t packed_bytes(int64_t kind, int64_t k) {
    return with_kind(kind, [&](auto is) {
        using F = Format<is>;
        return k / (F::GROUP * F::GROUPS) * F::BYTES / OUTPUTS;
    });
}

// rows [n] of blocks of a kind as GGUF has them -> packed, whose memory is zeros. gated: as pack.
void pack_groups(const uint8_t* rows, int64_t n, int64_t k, int64_t kind, int32_t gated, uint8_t* packed,
                 int32_t threads) {
    const int64_t columns = gated ? n / 2 : n, wide = gated ? WIDTH : OUTPUTS;
    team(threads, [&](int index, int count) {
        const Range mine = share(columns, wide, index, count);  // whole blocks
        with_kind(kind, [&](auto is) {
            const int64_t blocks = k / (Format<is>::GROUP * Format<is>::GROUPS), row_bytes = blocks * Format<is>::FILE_BYTES;
            for (int64_t row = 0; row < n; row++) {
                const int64_t column = row % columns, half = row / columns;
                if (column < mine.begin || column >= mine.end) continue;
                const int64_t output = column / wide * OUTPUTS + half * WIDTH + column % wide;
                pack_output<is>(rows + row * row_bytes, blocks, output, packed);
            }
        });
    });
}

}  // extern "C"
