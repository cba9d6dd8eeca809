// Collective calls of ranks on one host through their stages (turns.h). Bytes copied or read per rank, for N bytes in
// and n ranks; a stage of 1 MiB stays in the cache that the cores share.
//
//   all_reduce, direct      N into the stage, n N read                   one wait; for small N
//   all_reduce, two steps   N into the stage, N read, N copied out       two waits; every rank sums one n-th
//   reduce_scatter          N (n-1)/n into the stage, N read
//   all_gather              N into the stage, n N copied out
//   all_to_all              N (n-1)/n into the stage, N copied out
//   broadcast               N at the root, N at each other rank
//
// Every function returns OK, CHANGED (the members changed: nothing is promised of the results), MISMATCH (a member
// called something else) or UNSUPPORTED.

#define _GNU_SOURCE
#include "turns.h"

#define TRY(step)                      \
    do {                               \
        int code_ = (step);            \
        if (code_) return end(g, code_); \
    } while (0)

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

void mc_enter(Group *g) {  // the epoch of `g`, in phase 0
    Head *own = head(g, g->me);
    set(own, &own->done, g->epoch, 0);
    set(own, &own->ready, g->epoch, 0);
}

uint64_t mc_late(Group *g) {  // the members, as bits, that keep the running call from going on
    uint64_t late = 0;
    uint32_t phase = (uint32_t)atomic_load(&head(g, g->me)->ready);
    for (int i = 0; i < g->size; i++)
        if (!reached(g, atomic_load(&head(g, i)->ready), phase) || !reached(g, atomic_load(&head(g, i)->done), phase - 1))
            late |= 1ull << i;
    return late & ~(1ull << g->me);
}

int mc_reduce_buffers(void *to, const void *const *from, int count, int64_t n, int dtype, int op) {
    return reduce(to, from, count, n, dtype, op);
}

int mc_barrier(Group *g, uint64_t signature) {
    begin(g, signature);
    skip(g);
    publish(g);
    TRY(await_all(g));
    TRY(same(g));
    complete(g);
    return end(g, OK);
}

static int64_t cut(int64_t n, int part, int size) {  // where a part of n elements begins: at a multiple of 64
    return part >= size ? n : least(n, (n / size + 63) / 64 * 64 * part);
}

int mc_all_reduce(Group *g, uint64_t signature, const uint8_t *in, uint8_t *out, int64_t count, int dtype, int op,
                  int direct) {
    const int64_t width = WIDTHS[dtype], chunk = g->stage_bytes / width;
    const void *from[MOST];
    begin(g, signature);
    for (int64_t at = 0; at == 0 || at < count; at += chunk) {
        const int64_t n = least(chunk, count - at);
        const int last = at + chunk >= count;
        const uint8_t *mine = in + at * width;
        const int64_t first = cut(n, g->me, g->size), past = cut(n, g->me + 1, g->size);
        TRY(fill(g));
        if (direct) {
            memcpy(stage(g, g->me), mine, n * width);
        } else {  // my own part is read where it is
            memcpy(stage(g, g->me), mine, first * width);
            memcpy(stage(g, g->me) + past * width, mine + past * width, (n - past) * width);
        }
        publish(g);
        TRY(await_all(g));
        if (at == 0) TRY(same(g));
        if (direct) {
            if (last) complete(g);
            for (int i = 0; i < g->size; i++) from[i] = stage(g, i);
            TRY(reduce(out + at * width, from, g->size, n, dtype, op));
        } else {
            for (int i = 0; i < g->size; i++) from[i] = (i == g->me ? mine : stage(g, i)) + first * width;
            TRY(fill(g));
            uint8_t *sums = stage(g, g->me);
            TRY(reduce(sums + first * width, from, g->size, past - first, dtype, op));
            Head *own = head(g, g->me);
            set(own, &own->done, g->epoch, g->phase - 1);
            publish(g);
            TRY(await_all(g));
            if (last) complete(g);
            for (int i = 0; i < g->size; i++) {
                const int64_t begins = cut(n, i, g->size), ends = cut(n, i + 1, g->size);
                memcpy(out + (at + begins) * width, stage(g, i) + begins * width, (ends - begins) * width);
            }
        }
        if (!last) done(g);
    }
    return end(g, OK);
}

int mc_reduce(Group *g, uint64_t signature, const uint8_t *in, uint8_t *out, int64_t count, int dtype, int op, int root) {
    const int64_t width = WIDTHS[dtype], chunk = g->stage_bytes / width;
    const void *from[MOST];
    begin(g, signature);
    for (int64_t at = 0; at == 0 || at < count; at += chunk) {
        const int64_t n = least(chunk, count - at);
        const int last = at + chunk >= count, sums = g->me == root;
        if (sums) {
            skip(g);
        } else {
            TRY(fill(g));
            memcpy(stage(g, g->me), in + at * width, n * width);
        }
        publish(g);
        if (at == 0 || last || sums) TRY(await_all(g));
        if (at == 0) TRY(same(g));
        if (last) complete(g);
        if (sums) {
            for (int i = 0; i < g->size; i++) from[i] = i == root ? in + at * width : stage(g, i);
            TRY(reduce(out + at * width, from, g->size, n, dtype, op));
        }
        if (!last) done(g);
    }
    return end(g, OK);
}

int mc_reduce_scatter(Group *g, uint64_t signature, const uint8_t *const *ins, uint8_t *out, int64_t count, int dtype,
                      int op) {
    const int64_t width = WIDTHS[dtype], chunk = g->stage_bytes / g->size / width / 64 * 64;
    const void *from[MOST];
    begin(g, signature);
    for (int64_t at = 0; at == 0 || at < count; at += chunk) {
        const int64_t n = least(chunk, count - at);
        const int last = at + chunk >= count;
        TRY(fill(g));
        for (int i = 0; i < g->size; i++)
            if (i != g->me) memcpy(stage(g, g->me) + i * chunk * width, ins[i] + at * width, n * width);
        publish(g);
        TRY(await_all(g));
        if (at == 0) TRY(same(g));
        if (last) complete(g);
        for (int i = 0; i < g->size; i++)
            from[i] = i == g->me ? ins[i] + at * width : stage(g, i) + g->me * chunk * width;
        TRY(reduce(out + at * width, from, g->size, n, dtype, op));
        if (!last) done(g);
    }
    return end(g, OK);
}

// root < 0: every rank gets the parts of all (all_gather); otherwise only the root does (gather).
int mc_gather(Group *g, uint64_t signature, const uint8_t *in, uint8_t *const *outs, int64_t bytes, int root) {
    const int64_t chunk = g->stage_bytes;
    const int takes = root < 0 || root == g->me, gives = root != g->me;
    begin(g, signature);
    for (int64_t at = 0; at == 0 || at < bytes; at += chunk) {
        const int64_t n = least(chunk, bytes - at);
        const int last = at + chunk >= bytes;
        if (gives) {
            TRY(fill(g));
            memcpy(stage(g, g->me), in + at, n);
        } else {
            skip(g);
        }
        publish(g);
        if (at == 0 || last || takes) TRY(await_all(g));
        if (at == 0) TRY(same(g));
        if (last) complete(g);
        for (int i = 0; takes && i < g->size; i++) {
            const uint8_t *part = i == g->me ? in + at : stage(g, i);
            if (outs[i] + at != part) memcpy(outs[i] + at, part, n);
        }
        if (!last) done(g);
    }
    return end(g, OK);
}

int mc_broadcast(Group *g, uint64_t signature, uint8_t *bytes_, int64_t bytes, int root) {
    const int64_t chunk = g->stage_bytes;
    begin(g, signature);
    for (int64_t at = 0; at == 0 || at < bytes; at += chunk) {
        const int64_t n = least(chunk, bytes - at);
        const int last = at + chunk >= bytes;
        if (g->me == root) {
            TRY(fill(g));
            memcpy(stage(g, g->me), bytes_ + at, n);
        } else {
            skip(g);
        }
        publish(g);
        TRY(at == 0 || last ? await_all(g) : await_member(g, root));
        if (at == 0) TRY(same(g));
        if (last) complete(g);
        if (g->me != root) memcpy(bytes_ + at, stage(g, root), n);
        if (!last) done(g);
    }
    return end(g, OK);
}

static int64_t slot_of(const Group *g) {  // bytes for each other member in a stage
    return g->size < 2 ? g->stage_bytes : g->stage_bytes / (g->size - 1) / 64 * 64;
}

static int place(int giver, int taker) { return taker < giver ? taker : taker - 1; }  // of the slot in the giver's stage

static int sizes_agree(Group *g, int64_t *longest) {
    const int parity = g->call & 1;
    *longest = 0;
    for (int giver = 0; giver < g->size; giver++)
        for (int taker = 0; taker < g->size; taker++) {
            const int64_t n = head(g, giver)->sent[parity][taker];
            if (n != head(g, taker)->taken[parity][giver]) {
                g->culprit = giver;
                return MISMATCH;
            }
            if (giver != taker && n > *longest) *longest = n;
        }
    return OK;
}

// ins, outs: an address per member; sent, taken: bytes per member. A scatter is one where only the root sends.
int mc_all_to_all(Group *g, uint64_t signature, const uint8_t *const *ins, const int64_t *sent, uint8_t *const *outs,
                  const int64_t *taken) {
    const int64_t slot = slot_of(g);
    int64_t longest = 0;
    begin(g, signature);
    memcpy(head(g, g->me)->sent[g->call & 1], sent, g->size * sizeof *sent);
    memcpy(head(g, g->me)->taken[g->call & 1], taken, g->size * sizeof *taken);
    for (int64_t at = 0; at == 0 || at < longest; at += slot) {
        TRY(fill(g));
        for (int i = 0; i < g->size; i++)
            if (i != g->me && at < sent[i])
                memcpy(stage(g, g->me) + place(g->me, i) * slot, ins[i] + at, least(slot, sent[i] - at));
        publish(g);
        TRY(await_all(g));
        if (at == 0) {
            TRY(same(g));
            TRY(sizes_agree(g, &longest));
        }
        const int last = at + slot >= longest;
        if (last) complete(g);
        if (at == 0 && outs[g->me] != ins[g->me]) memcpy(outs[g->me], ins[g->me], least(sent[g->me], taken[g->me]));
        for (int i = 0; i < g->size; i++)
            if (i != g->me && at < taken[i])
                memcpy(outs[i] + at, stage(g, i) + place(i, g->me) * slot, least(slot, taken[i] - at));
        if (!last) done(g);
    }
    return end(g, OK);
}
