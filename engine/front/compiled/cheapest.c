/* Finds the nodes that an acceptor asks before it places a request, in one pass over the columns of a view. These are
   the nodes on which the prompt's prefill is cheapest; some of them are drawn. The reference is
   MooncakePlacement.shortlist of sched/placement/mooncake.py, without a pool; given the same random numbers it names
   the same nodes. */

#include <math.h>
#include <stdint.h>

enum { A0, A1, A2, OPEN_AT, RUNNING = 7, TOTAL_BLOCKS = 10, TOLLED = 16, CHUNK = 64 };
/* The same names as in the reference. */
enum { SMALL_CLUSTER = 16, SHORTLIST_SIZE = 4, DRAWN_NODES = 3, MAX_DRAWS = 2 * DRAWN_NODES, MAX_WIDTH = 256 };
static const double TOLL_OF_PROMPT = 0.125, PROMPT_TOLL_MOST = 4.0; /* of sched/placement/view.py */
enum { MAX_CHOSEN = 32 }; /* all nodes of a small cluster, a holder and four decode nodes, or seven draws */

#if defined(__x86_64__)
#define FASTEST __attribute__((target_clones("default", "avx2")))
#else
#define FASTEST
#endif

/* What View.address points at. */
struct view {
    const double *table; /* [17, nodes] */
    int64_t nodes;
    const uint8_t *prefills; /* [nodes]: has the role */
    const int64_t *order;    /* [orders]: those that decode, the fastest first */
    const double *free;      /* [orders]: their free blocks */
    int64_t orders;
    const int64_t *takers; /* [num_takers]: those that prefill and have room in the queue */
    int64_t num_takers;
};

/* splitmix64, in [0, 1). */
static double drawn(uint64_t *state)
{
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

static int64_t one_of(const int64_t *nodes, int64_t size, uint64_t *state)
{
    return nodes[(int64_t)(drawn(state) * (double)size)];
}

/* Appends a node that is not there yet; returns how many are. */
static int64_t add(int64_t *chosen, int64_t count, int64_t node)
{
    for (int64_t i = 0; i < count; i++)
        if (chosen[i] == node)
            return count;
    chosen[count] = node;
    return count + 1;
}

/* The first node with most matched; -1 if none has any. */
FASTEST static int64_t deepest(const double *matched, int64_t nodes)
{
    double most = 0.0;
    int64_t holder = -1;
    for (int64_t from = 0; matched && from < nodes; from += CHUNK) {
        int64_t size = nodes - from < CHUNK ? nodes - from : CHUNK, deeper = 0;
        for (int64_t j = 0; j < size; j++) /* nearly every chunk is passed over, and counting is done in vectors */
            deeper += matched[from + j] > most;
        for (int64_t i = from; deeper && i < from + size; i++)
            if (matched[i] > most) {
                most = matched[i];
                holder = i;
            }
    }
    return holder;
}

static int able(const struct view *view, int64_t i, double tokens, double block_size)
{
    const double *open_at = view->table + OPEN_AT * view->nodes, *total = view->table + TOTAL_BLOCKS * view->nodes;
    return (open_at[i] < INFINITY) & (total[i] * block_size > tokens);
}

/* How many nodes can take the prompt. */
FASTEST static int64_t count_able(const struct view *view, double tokens, double block_size)
{
    int64_t size = 0;
    for (int64_t i = 0; i < view->nodes; i++)
        size += able(view, i, tokens, block_size);
    return size;
}

/* One of the `size` nodes that can take the prompt. */
static int64_t one_able(const struct view *view, double tokens, double block_size, int64_t size, uint64_t *state)
{
    int64_t left = (int64_t)(drawn(state) * (double)size), i = -1;
    do
        left -= able(view, ++i, tokens, block_size);
    while (left >= 0);
    return i;
}

/* At most `width` nodes of finite cost into `best`, the cheapest first and of equals the first. Returns how many were
   written. */
FASTEST static int64_t cheapest(const struct view *view, const double *matched, double now, double tokens,
                                double block_size, int64_t width, int64_t *best)
{
    int64_t nodes = view->nodes, count = 0;
    const double *a0 = view->table + A0 * nodes, *a1 = view->table + A1 * nodes, *a2 = view->table + A2 * nodes;
    const double *open_at = view->table + OPEN_AT * nodes, *total = view->table + TOTAL_BLOCKS * nodes;
    const double *tolled = view->table + TOLLED * nodes, *running = view->table + RUNNING * nodes;
    double rank[CHUNK], costs[MAX_WIDTH], squared = tokens * tokens, limit = INFINITY;
    for (int64_t from = 0; from < nodes; from += CHUNK) {
        int64_t size = nodes - from < CHUNK ? nodes - from : CHUNK;
        for (int64_t j = 0; j < size; j++) {
            int64_t i = from + j;
            rank[j] = a0[i] + a1[i] * tokens + a2[i] * squared;
        }
        if (matched) {
            const double *own = matched + from;
            for (int64_t j = 0; j < size; j++)
                rank[j] -= (a2[from + j] * own[j] + a1[from + j]) * own[j];
        }
        for (int64_t j = 0; j < size; j++) {
            int64_t i = from + j;
            double at = open_at[i] > now ? open_at[i] : now;
            double toll = TOLL_OF_PROMPT * running[i];
            toll = (toll < PROMPT_TOLL_MOST ? toll : PROMPT_TOLL_MOST) * tolled[i];
            double cost = rank[j] + rank[j] * toll + at;
            rank[j] = total[i] * block_size <= tokens ? INFINITY : cost;
        }
        int64_t cheaper = 0;
        for (int64_t j = 0; j < size; j++)
            cheaper += rank[j] < limit;
        for (int64_t j = 0; cheaper && j < size; j++) {
            if (!(rank[j] < limit))
                continue;
            int64_t place = count < width ? count++ : width - 1;
            for (; place > 0 && costs[place - 1] > rank[j]; place--) {
                costs[place] = costs[place - 1];
                best[place] = best[place - 1];
            }
            costs[place] = rank[j];
            best[place] = from + j;
            limit = count < width ? INFINITY : costs[width - 1];
        }
    }
    return count;
}

/* The place in `order` of the decode node with `at` other roomy ones before it. */
static int64_t roomy(const struct view *view, int64_t need, int64_t at)
{
    int64_t i = -1;
    do
        at -= view->free[++i] >= (double)need;
    while (at >= 0);
    return i;
}

/* Appends decode nodes: of the fastest with room for `need` blocks; if none has room, of the fastest. */
static int64_t decodes(const struct view *view, int64_t need, int64_t width, uint64_t *state, int64_t *chosen,
                       int64_t count)
{
    int64_t picked[DRAWN_NODES], found = 0, size = 0;
    int64_t most = view->nodes <= SMALL_CLUSTER ? SHORTLIST_SIZE : width < view->orders ? width : view->orders;
    if (most > SHORTLIST_SIZE)
        for (int tries = 0; tries < MAX_DRAWS && found < DRAWN_NODES; tries++) {
            int64_t at = (int64_t)(drawn(state) * (double)most);
            if (view->free[at] >= (double)need)
                picked[found++] = view->order[at];
        }
    if (found == DRAWN_NODES) {
        for (int i = 0; i < DRAWN_NODES; i++)
            count = add(chosen, count, picked[i]);
        return count;
    }
    for (int64_t i = 0; i < view->orders && size < most; i++)
        size += view->free[i] >= (double)need;
    int any = !size; /* whether the node has room does not matter */
    size = size ? size : most < view->orders ? most : view->orders;
    for (int64_t i = 0; i < (size <= SHORTLIST_SIZE ? size : DRAWN_NODES); i++) {
        int64_t at = size <= SHORTLIST_SIZE ? i : (int64_t)(drawn(state) * (double)size);
        count = add(chosen, count, view->order[any ? at : roomy(view, need, at)]);
    }
    return count;
}

/* matched [nodes] or NULL; need: blocks on a decode node; expected: arrivals since the records were written; seed in
   [0, 1). Writes the shortlist into chosen [MAX_CHOSEN] and returns its length; -1 if it would draw from more than
   MAX_WIDTH cheapest nodes. */
int64_t shortlist(const struct view *view, const double *matched, double now, int64_t num_tokens, int64_t need,
                  int64_t block_size, double expected, double seed, int64_t *chosen)
{
    if (!(expected < 0x1.0p62))
        return -1;
    double tokens = (double)num_tokens, size = (double)block_size;
    int64_t width = 1 + (int64_t)ceil(expected), nodes = view->nodes, count = 0, found;
    width = width < DRAWN_NODES ? DRAWN_NODES : width;
    uint64_t state = (uint64_t)(seed * 0x1.0p53);
    int64_t best[MAX_WIDTH];
    if (nodes <= SMALL_CLUSTER) {
        found = cheapest(view, matched, now, tokens, size, width < SHORTLIST_SIZE ? SHORTLIST_SIZE : width, best);
        for (int64_t i = 0; i < found; i++)
            count = add(chosen, count, best[i]);
    } else if (width >= nodes) {
        found = count_able(view, tokens, size);
        for (int i = 0; found && i < DRAWN_NODES; i++)
            count = add(chosen, count, one_able(view, tokens, size, found, &state));
    } else if (width <= MAX_WIDTH) {
        found = cheapest(view, matched, now, tokens, size, width, best);
        for (int i = 0; found && i < DRAWN_NODES; i++)
            count = add(chosen, count, one_of(best, found, &state));
    } else {
        return -1;
    }
    if (!found)
        return 0;
    if (nodes > SMALL_CLUSTER) {
        int64_t other = view->num_takers ? one_of(view->takers, view->num_takers, &state)
                        : width >= nodes ? one_able(view, tokens, size, found, &state)
                                         : one_of(best, found, &state);
        if (able(view, other, tokens, size))
            count = add(chosen, count, other);
    }
    int64_t holder = deepest(matched, nodes);
    if (holder >= 0 && view->prefills[holder])
        count = add(chosen, count, holder);
    return decodes(view, need, width, &state, chosen, count);
}
