// The operations at levels without tiles, for one type of elements (-DELEMENT), and of quantized weights at every level.
#include "groups.h"
#include "ops.h"

extern "C" {

// rows [n][k / 32] groups of a kind as GGUF has them -> packed, whose memory is zeros. gated: as pack.
void pack_groups(const uint8_t* rows, int64_t n, int64_t k, int64_t kind, int32_t gated, uint8_t* packed,
                 int32_t threads) {
    const int64_t columns = gated ? n / 2 : n, wide = gated ? WIDTH : OUTPUTS, groups = k / GROUP;
    const int64_t row_bytes = groups * group_bytes(kind);
    team(threads, [&](int index, int count) {
        const Range mine = share(columns, wide, index, count);  // whole blocks
        for (int64_t row = 0; row < n; row++) {
            const int64_t column = row % columns, half = row / columns;
            if (column < mine.begin || column >= mine.end) continue;
            const int64_t output = column / wide * OUTPUTS + half * WIDTH + column % wide;
            with_kind(kind, [&](auto is) { pack_output<is>(rows + row * row_bytes, groups, output, packed); });
        }
    });
}

}  // extern "C"
