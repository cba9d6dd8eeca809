// The limits of this machine: bytes read per second, and products of AMX tiles held in registers.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

extern "C" {

// XOR of all 64-byte lines of memory[bytes], each thread one ascending part, prefetched 2 KiB ahead.
int64_t read_memory(const char* memory, int64_t bytes, int32_t threads) {
    int64_t total = 0;
    const int64_t part = bytes / threads / 1024 * 1024;
#pragma omp parallel for num_threads(threads) reduction(^ : total)
    for (int32_t thread = 0; thread < threads; thread++) {
        __m512i sum[4] = {};
        const char* from = memory + thread * part;
        for (int64_t i = 0; i < part; i += 256)
            for (int line = 0; line < 4; line++) {
                _mm_prefetch(from + i + 2048 + 64 * line, _MM_HINT_T0);
                sum[line] = _mm512_xor_si512(sum[line], _mm512_loadu_si512(from + i + 64 * line));
            }
        for (const __m512i& s : sum) total ^= _mm512_reduce_add_epi64(s);
    }
    return total;
}

// rounds x 4 tile products on each thread, 16,384 floating-point operations each.
void multiply_tiles(int64_t rounds, int32_t threads) {
    syscall(SYS_arch_prctl, 0x1023, 18);
#pragma omp parallel for num_threads(threads)
    for (int32_t thread = 0; thread < threads; thread++) {
        alignas(64) uint8_t config[64] = {1}, before[64];
        for (int tile = 0; tile < 8; tile++) {
            config[16 + 2 * tile] = 64;
            config[48 + tile] = 16;
        }
        _tile_storeconfig(before);
        asm volatile("" : : "r"(config) : "memory");
        _tile_loadconfig(config);
        for (int64_t i = 0; i < rounds; i++) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        if (before[0])
            _tile_loadconfig(before);
        else
            _tile_release();
    }
}
}
