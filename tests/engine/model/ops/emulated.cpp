// One product with a quantized weight, for a CPU that this machine is not: engine/model/cpu/ops_any.cpp, or ops_bytes.cpp
// with -DPACK_BYTES.
//
// stdin: n, k, kind, m, the bytes of the codes and of the scales (int64 each); codes, scales, x [m, k] float32.
// stdout: y [m, n] float32.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

struct Packed {
    const void* packed;
    const float* bias;
    int64_t n, k, kind;
};

extern "C" {
int32_t block_outputs();
int32_t packed_bytes(int64_t kind, int64_t k);
void pack_groups(const uint8_t* rows, int64_t n, int64_t k, int64_t kind, int32_t gated, uint8_t* packed, int32_t threads);
void pack_bytes(const uint8_t* q, const float* scales, int64_t n, int64_t k, int64_t kind, int32_t gated, uint8_t* packed,
                int32_t threads);
void linear(const Packed* w, const float* x, int64_t stride, int64_t m, void* y, int32_t wide, int32_t threads);
}

template <class T>
std::vector<T> taken(int64_t count) {
    std::vector<T> values(count);
    if (count && fread(values.data(), sizeof(T), count, stdin) != (size_t)count) exit(2);
    return values;
}

int main() {
    const auto sizes = taken<int64_t>(6);
    const int64_t n = sizes[0], k = sizes[1], kind = sizes[2], m = sizes[3], block = block_outputs();
    const auto codes = taken<uint8_t>(sizes[4]);
    const auto scales = taken<float>(sizes[5] / sizeof(float));
    const auto x = taken<float>(m * k);
    std::vector<uint8_t> packed((n + block - 1) / block * block * packed_bytes(kind, k));
#ifdef PACK_BYTES
    pack_bytes(codes.data(), scales.data(), n, k, kind, 0, packed.data(), 1);
#else
    pack_groups(codes.data(), n, k, kind, 0, packed.data(), 1);
#endif
    const Packed w{packed.data(), nullptr, n, k, kind};
    std::vector<float> y(m * n);
    linear(&w, x.data(), k, m, y.data(), 1, 1);
    return fwrite(y.data(), sizeof(float), y.size(), stdout) == y.size() ? 0 : 3;
}
