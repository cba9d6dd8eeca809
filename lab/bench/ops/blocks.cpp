// Reads blocks of memory that are scattered, and does nothing else: what attention over paged KV can read at most.
#include <cstdint>

namespace {

constexpr int64_t PART = 512;  // bytes that are read and prefetched in turns

// XOR of the 64-bit words of N blocks, which are read together: N streams for the hardware's prefetchers.
template <int N>
uint64_t xor_of(const char* const* blocks, int64_t bytes) {
    constexpr int LINE = 8;  // words of a cache line
    uint64_t sums[N][LINE] = {};
    for (int64_t at = 0; at < bytes; at += 64)
        for (int n = 0; n < N; n++) {
            const uint64_t* line = reinterpret_cast<const uint64_t*>(blocks[n] + at);
            for (int word = 0; word < LINE; word++) sums[n][word] ^= line[word];
        }
    uint64_t total = 0;
    for (int n = 0; n < N; n++)
        for (int word = 0; word < LINE; word++) total ^= sums[n][word];
    return total;
}

template <int N>
uint64_t all(const char* const* blocks, int64_t count, int64_t bytes, int32_t threads) {
    uint64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(^ : total)
    for (int64_t i = 0; i < count / N; i++) total ^= xor_of<N>(blocks + i * N, bytes);
    for (int64_t i = count / N * N; i < count; i++) total ^= xor_of<1>(blocks + i, bytes);
    return total;
}

}  // namespace

extern "C" {

// XOR of `count` blocks of `bytes` each, a multiple of 64, one after the other or four at a time.
uint64_t read_blocks(const char* const* blocks, int64_t count, int64_t bytes, int32_t threads) {
    return all<1>(blocks, count, bytes, threads);
}

// The same, one after the other, while the lines of the next block are prefetched.
uint64_t read_blocks_ahead(const char* const* blocks, int64_t count, int64_t bytes, int32_t threads) {
    uint64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(^ : total)
    for (int64_t i = 0; i < count; i++) {
        const char* next = blocks[i + 1 < count ? i + 1 : i];
        for (int64_t at = 0; at < bytes; at += PART) {
            const int64_t part = bytes - at < PART ? bytes - at : PART;
            for (int64_t line = 0; line < part; line += 64) __builtin_prefetch(next + at + line);
            const char* from = blocks[i] + at;
            total ^= xor_of<1>(&from, part);
        }
    }
    return total;
}

uint64_t read_four_blocks(const char* const* blocks, int64_t count, int64_t bytes, int32_t threads) {
    return all<4>(blocks, count, bytes, threads);
}
}
