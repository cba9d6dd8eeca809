// Words in shared memory that one process sets and another waits for: spinning first, then asleep in the kernel

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SPINS = 64 };

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

typedef struct {
    _Alignas(64) _Atomic uint32_t rung;      // grows with every ring
    _Alignas(64) _Atomic uint32_t sleepers;  // threads that sleep until it rings
} Bell;

static void ring(Bell *bell) {
    atomic_fetch_add(&bell->rung, 1);
    if (atomic_load(&bell->sleepers)) syscall(SYS_futex, &bell->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

// Sleeps until the bell has rung since it showed `seen`, at most until `deadline`.
static void doze(Bell *bell, uint32_t seen, int64_t deadline) {
    int64_t left = deadline - now_ns();
    if (left <= 0) return;
    const struct timespec slice = {left / 1000000000, left % 1000000000};
    atomic_fetch_add(&bell->sleepers, 1);
    if (atomic_load(&bell->rung) == seen) syscall(SYS_futex, &bell->rung, FUTEX_WAIT, seen, &slice, NULL, 0);
    atomic_fetch_sub(&bell->sleepers, 1);
}

static inline void relax(int yields) {
    if (yields) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
