// Turns of ranks on one host: each rank writes its own segment, and the others, who have mapped it, read it.
//
// A segment is a Head and two stages of bytes. A call is a sequence of phases. In phase s a rank fills its stage s % 2,
// sets `ready` to s, waits until the ranks that it needs are ready, reads from their stages, and sets `done` to s. It
// fills the stage of phase s only when all others are done with phase s - 2. Nobody writes into another rank's segment
// (but for the count of sleepers), so a rank that wakes up late can damage nobody.
//
// When ranks are lost
// -------------------
// A call is complete for a rank when all members have published its last phase. So when a process has ended, the call
// that runs is complete for all survivors or for none: what one of them has seen, all can see, also in the memory of the
// dead rank. The owner of the group (epochs.py) sets `stopped`: a call that can still become complete does, others return
// CHANGED. The next epoch begins with mc_enter: members publish it in their words, and nobody fills a stage before all
// members have entered.

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "reduce.h"

enum { MOST = 64, HEAD_BYTES = 4096, SLICE_NS = 20000000, SPINS = 64 };

typedef struct {
    _Alignas(64) _Atomic uint64_t ready;     // epoch << 32 | last phase whose stage is filled
    _Alignas(64) _Atomic uint64_t done;      // epoch << 32 | last phase in which nothing is left to be read
    _Alignas(64) _Atomic uint32_t sleepers;  // threads of other ranks that sleep until ready or done changes
    _Alignas(64) uint64_t signature[2];      // of the call, by the parity of its number
    _Alignas(64) int64_t sent[2][MOST];      // of the same call, all_to_all: bytes for each member
    int64_t taken[2][MOST];                  // bytes that it expects from each member
} Head;
_Static_assert(sizeof(Head) <= HEAD_BYTES, "the head has outgrown its page");

typedef struct {  // private to the process; native.py mirrors it
    int32_t size, me;
    uint32_t epoch, phase;
    int64_t stage_bytes, spin_ns;
    int32_t yields, culprit;  // culprit: the member whose call differs, after MISMATCH
    int64_t call;             // number of the running call
    _Atomic int64_t calls;    // that are complete
    _Atomic int64_t stopped;  // 1: members are gone
    _Atomic int64_t moved_ns; // when the running call last moved on, CLOCK_MONOTONIC; 0: no call runs
    uint8_t *segments[MOST];  // of the members, in the order of their ranks
} Group;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static Head *head(const Group *g, int member) { return (Head *)g->segments[member]; }

static uint8_t *stage(const Group *g, int member) {
    return g->segments[member] + HEAD_BYTES + (g->phase & 1) * g->stage_bytes;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void set(Head *own, _Atomic uint64_t *word, uint32_t epoch, uint32_t phase) {
    atomic_store(word, (uint64_t)epoch << 32 | phase);
    if (atomic_load(&own->sleepers))  // the low half is the futex: both x86 and ARM are little-endian
        syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static int reached(const Group *g, uint64_t value, uint32_t phase) {
    return (uint32_t)(value >> 32) == g->epoch && (int32_t)((uint32_t)value - phase) >= 0;
}

static int await_word(Group *g, Head *of, _Atomic uint64_t *word, uint32_t phase) {
    if (reached(g, atomic_load_explicit(word, memory_order_acquire), phase)) return OK;
    int64_t until = now_ns() + g->spin_ns;
    do {
        for (int i = 0; i < SPINS; i++) {
            if (reached(g, atomic_load_explicit(word, memory_order_acquire), phase)) return OK;
            if (g->yields) {
                sched_yield();
                i += SPINS / 8;
            } else {
                relax();
            }
        }
    } while (now_ns() < until);
    const struct timespec slice = {0, SLICE_NS};
    for (;;) {
        atomic_fetch_add(&of->sleepers, 1);
        uint64_t value = atomic_load(word);
        if (!reached(g, value, phase) && !atomic_load(&g->stopped))
            syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)value, &slice, NULL, 0);
        atomic_fetch_sub(&of->sleepers, 1);
        if (reached(g, atomic_load(word), phase)) return OK;
        if (atomic_load(&g->stopped)) return CHANGED;
    }
}

// Begins the next phase: afterwards stage(g, me) may be filled. Members that fill nothing call `skip` instead.
static int fill(Group *g) {
    for (int i = 1; i < g->size; i++) {
        Head *peer = head(g, (g->me + i) % g->size);
        int code = await_word(g, peer, &peer->done, g->phase - 1);
        if (code) return code;
    }
    g->phase++;
    return OK;
}

static void skip(Group *g) { g->phase++; }

static void publish(Group *g) {
    atomic_store_explicit(&g->moved_ns, now_ns(), memory_order_relaxed);
    Head *own = head(g, g->me);
    set(own, &own->ready, g->epoch, g->phase);
}

static int await_member(Group *g, int member) {
    return member == g->me ? OK : await_word(g, head(g, member), &head(g, member)->ready, g->phase);
}

static int await_all(Group *g) {
    for (int i = 1; i < g->size; i++) {
        int code = await_member(g, (g->me + i) % g->size);
        if (code) return code;
    }
    return OK;
}

static void done(Group *g) {
    Head *own = head(g, g->me);
    set(own, &own->done, g->epoch, g->phase);
}

static void begin(Group *g, uint64_t signature) {
    g->call = atomic_load(&g->calls) + 1;
    head(g, g->me)->signature[g->call & 1] = signature;
    atomic_store_explicit(&g->moved_ns, now_ns(), memory_order_relaxed);
}

// After the first phase of a call: all members have called the same.
static int same(Group *g) {
    uint64_t own = head(g, g->me)->signature[g->call & 1];
    for (int i = 0; i < g->size; i++)
        if (head(g, i)->signature[g->call & 1] != own) {
            g->culprit = i;
            return MISMATCH;
        }
    return OK;
}

// All members have published the last phase: the call is complete.
static void complete(Group *g) { atomic_store(&g->calls, g->call); }

// The end of a call. What was read is valid only if no member had left for another epoch by then: that is how a rank
// that was stopped, and meanwhile removed, learns that others have refilled their stages. It waits to be told so.
static int end(Group *g, int code) {
    if (code == MISMATCH) complete(g);
    if (code == OK || code == MISMATCH) {
        done(g);
        atomic_thread_fence(memory_order_acquire);
        for (int i = 0; i < g->size; i++)
            if ((int32_t)((uint32_t)(atomic_load(&head(g, i)->ready) >> 32) - g->epoch) > 0) {
                const struct timespec nap = {0, 1000000};
                while (!atomic_load(&g->stopped)) nanosleep(&nap, NULL);
                code = CHANGED;
                break;
            }
    }
    atomic_store_explicit(&g->moved_ns, 0, memory_order_relaxed);
    return code;
}
