// A round: one process asks several others, and takes their answers.
//
// A desk is the shared memory between the asking process and one other: a Desk, then the message, then the answer. Only
// the asking process writes messages and `asked`, only the other one writes answers, `answered` and `beats`. A message
// stays untouched until it has been answered, so a rank that was given up and wakes up late disturbs nobody.

#include <stddef.h>

#include "bell.h"
#include "rows.h"

#include "lanes.h"

// Messages and results from this size on are written past the caches: they would push out what is needed next.
enum { STREAM_BYTES = 8 << 20 };

typedef struct {
    _Alignas(64) _Atomic uint64_t asked;     // number of the last message
    _Alignas(64) _Atomic uint64_t answered;  // number of the last message that has its answer
    _Alignas(64) _Atomic uint64_t beats;     // grows as long as the process runs
    Bell door;                               // rings when there is a message
} Desk;
_Static_assert(sizeof(Desk) <= 4096, "a desk has outgrown its page");
_Static_assert(offsetof(Desk, answered) == 64, "desk.py: ANSWERED_AT");

void mr_ask(Desk *desk, uint64_t number) {
    atomic_store(&desk->asked, number);
    ring(&desk->door);
}

void mr_answer(Desk *desk, Bell *bell, uint64_t number) {
    atomic_store(&desk->answered, number);
    ring(bell);
}

// A network card has written the number of a message, or that of an answer: wake who sleeps.
void mr_message_landed(Desk *desk) { ring(&desk->door); }
void mr_answer_landed(Bell *bell) { ring(bell); }

uint64_t mr_asked(Desk *desk) { return atomic_load(&desk->asked); }
uint64_t mr_answered(Desk *desk) { return atomic_load(&desk->answered); }
uint64_t mr_beats(Desk *desk) { return atomic_load(&desk->beats); }
void mr_live(Desk *desk) { atomic_fetch_add(&desk->beats, 1); }

// The number of a message that is not answered yet; 0 at the end of the time. Another number than the next one is none:
// Soft-RoCE may write one byte by byte.
uint64_t mr_await_message(Desk *desk, int64_t spin_ns, int yields, int64_t time_ns) {
    int64_t begun = now_ns();
    for (;;) {
        uint32_t seen = atomic_load(&desk->door.rung);
        for (int i = 0; i < SPINS; i++) {
            uint64_t asked = atomic_load_explicit(&desk->asked, memory_order_acquire);
            if (asked == atomic_load_explicit(&desk->answered, memory_order_relaxed) + 1) return asked;
            relax(yields);
        }
        int64_t now = now_ns();
        if (now - begun >= time_ns) return 0;
        if (now - begun >= spin_ns) doze(&desk->door, seen, begun + time_ns);
    }
}

// A bit for each of `count` desks, at most 64, that has answered its last message: all of them, or what there is at the
// end of the time.
uint64_t mr_await_answers(Desk **desks, int count, Bell *bell, int64_t spin_ns, int yields, int64_t time_ns) {
    uint64_t all = count == 64 ? ~0ull : (1ull << count) - 1, done = 0;
    int64_t begun = now_ns();
    for (;;) {
        uint32_t seen = atomic_load(&bell->rung);
        for (int i = 0; i < SPINS; i++) {
            for (int d = 0; d < count; d++)
                if (atomic_load_explicit(&desks[d]->answered, memory_order_acquire) ==
                    atomic_load_explicit(&desks[d]->asked, memory_order_relaxed))
                    done |= 1ull << d;
            if (done == all) return done;
            relax(yields);
        }
        int64_t now = now_ns();
        if (now - begun >= time_ns) return done;
        if (now - begun >= spin_ns) doze(bell, seen, begun + time_ns);
    }
}

typedef struct {
    Desk *desk;
    int64_t period_ns;
    _Atomic int32_t *stop;
} Heart;

static void *beat(void *given) {
    Heart heart = *(Heart *)given;
    const struct timespec period = {heart.period_ns / 1000000000, heart.period_ns % 1000000000};
    while (!atomic_load(heart.stop)) {
        atomic_fetch_add(&heart.desk->beats, 1);
        nanosleep(&period, NULL);
    }
    return NULL;
}

// Starts a thread that beats until `stop` is set; it needs no interpreter. `heart` must stay until mr_stop returns.
int mr_beat(Heart *heart, pthread_t *thread) { return pthread_create(thread, NULL, beat, heart); }

void mr_stop(Heart *heart, pthread_t *thread) {
    atomic_store(heart->stop, 1);
    pthread_join(*thread, NULL);
}

// --- the rows of a message

typedef struct {  // native.py mirrors it
    const uint8_t *x;         // [tokens, hidden] of `type`
    const int64_t *chosen;    // [tokens, top_k] experts; -1: not sent
    const float *weights;     // [tokens, top_k]
    const int32_t *table;     // [experts, columns]: rank * slots + slot; -1: no living rank has the expert
    int64_t *counts;          // [experts] += how often each was chosen; NULL: not counted
    int32_t *sent;            // [tokens, top_k]: the rank of a pair, or -1
    uint8_t *desks[MOST_RANKS];   // where the messages of the ranks begin
    int32_t *tokens[MOST_RANKS];  // per rank: the tokens of its rows, in rising order
    int64_t rows[MOST_RANKS], pairs[MOST_RANKS];
    int64_t num_tokens, hidden, top_k, columns, slots, ranks, first;  // first: which column the first token uses
    int64_t at_scales, at_pair_rows, at_pair_slots, at_pair_weights;  // bytes behind the begin of a message
    int32_t type, coded;      // coded: rows of codes with a scale each, INT8 or FP8
    int64_t own;              // the rank that reads x itself: its rows are not copied; -1: none
} Dispatch;

// Each token goes once to every rank that has one of its experts, with its (row, slot, weight) pairs there.
void mr_dispatch(Dispatch *d) {
    const int64_t width = d->type == FLOAT32 ? 4 : 2, given = d->hidden * width;
    static _Thread_local float wide[MOST_HIDDEN];
    static _Thread_local uint8_t codes[MOST_HIDDEN];
    const int large = d->num_tokens * given >= STREAM_BYTES;
    for (int64_t r = 0; r < d->ranks; r++) d->rows[r] = d->pairs[r] = 0;
    for (int64_t t = 0; t < d->num_tokens; t++) {
        float scale = -1;
        for (int64_t j = 0; j < d->top_k; j++) {
            const int64_t pair = t * d->top_k + j, expert = d->chosen[pair];
            d->sent[pair] = -1;
            if (expert < 0) continue;
            if (d->counts) d->counts[expert]++;
            const int32_t where = d->table[expert * d->columns + (d->first + t) % d->columns];
            if (where < 0) continue;
            const int64_t rank = where / d->slots;
            uint8_t *message = d->desks[rank];
            int64_t row = d->rows[rank] - 1;
            if (row < 0 || d->tokens[rank][row] != t) {
                row = d->rows[rank]++;
                d->tokens[rank][row] = (int32_t)t;
                const uint8_t *from = d->x + t * given;
                if (rank == d->own) {
                    // nothing to do
                } else if (!d->coded) {
                    copy_row(message + row * given, from, given, large && aligned(message, given));
                } else {
                    if (scale < 0) {
                        widen(from, wide, d->hidden, d->type);
                        scale = to_codes(wide, codes, d->hidden, d->coded);
                    }
                    memcpy(message + row * d->hidden, codes, d->hidden);
                    ((float *)(message + d->at_scales))[row] = scale;
                }
            }
            const int64_t at = d->pairs[rank]++;
            ((int32_t *)(message + d->at_pair_rows))[at] = (int32_t)row;
            ((int32_t *)(message + d->at_pair_slots))[at] = where % (int32_t)d->slots;
            ((float *)(message + d->at_pair_weights))[at] = d->weights[pair];
            d->sent[pair] = (int32_t)rank;
        }
    }
    if (large) stream_end();
}

// x [rows, hidden] of `type` from codes [rows, hidden] and scales [rows].
void mr_decode(
    const uint8_t *codes, const float *scales, void *x, int64_t rows, int64_t hidden, int type, int coded) {
    static _Thread_local float wide[MOST_HIDDEN];
    const int64_t width = type == FLOAT32 ? 4 : 2;
    for (int64_t r = 0; r < rows; r++) {
        from_codes(codes + r * hidden, scales[r], wide, hidden, coded);
        narrow(wide, (uint8_t *)x + r * hidden * width, hidden, type);
    }
}

// out [tokens, hidden] of `into_type`: the sum, in float32, of `base` [tokens, hidden] float32 (may be NULL) and of the
// answers' rows of each token, rank by rank. answers[r] is NULL for a rank whose rows do not count.
void mr_combine(const Dispatch *d, const uint8_t *const *answers, const float *base, void *out, int into_type) {
    const int64_t width = d->type == FLOAT32 ? 4 : 2, into = into_type == FLOAT32 ? 4 : 2;
    const int large = d->num_tokens * d->hidden * into >= STREAM_BYTES && aligned(out, d->hidden * into);
    int64_t next[MOST_RANKS] = {0};
    for (int64_t t = 0; t < d->num_tokens; t++) {
        const uint8_t *rows[MOST_RANKS];
        int64_t terms = 0;
        for (int64_t r = 0; r < d->ranks; r++) {
            if (next[r] == d->rows[r] || d->tokens[r][next[r]] != t) continue;
            if (answers[r]) rows[terms++] = answers[r] + next[r] * d->hidden * width;
            next[r]++;
        }
        const float *above = base ? base + t * d->hidden : NULL;
        sum_rows(above, rows, terms, (uint8_t *)out + t * d->hidden * into, d->hidden, d->type, into_type, large);
    }
    if (large) stream_end();
}
