/* The cheapest nodes to prefill a prompt on, and the node that has most of it: one pass over the columns of a view.
   The reference is ranking() of sched/placements/costs.py, without a pool. */

#include <math.h>
#include <stdint.h>

enum { A0, A1, A2, OPEN_AT, TOTAL_BLOCKS = 10, CHUNK = 64 };

/* table [16, nodes], matched [nodes] or NULL. Writes at most `width` nodes of finite cost into `best`, the cheapest
   first and of equals the first, their costs into `costs`, and the first with most matched into `holder`, -1 for none.
   Returns how many were written. */
int64_t cheapest(const double *table, const double *matched, int64_t nodes, double now, double tokens,
                 double block_size, int64_t width, int64_t *best, double *costs, int64_t *holder)
{
    const double *a0 = table + A0 * nodes, *a1 = table + A1 * nodes, *a2 = table + A2 * nodes;
    const double *open_at = table + OPEN_AT * nodes, *total = table + TOTAL_BLOCKS * nodes;
    double rank[CHUNK], squared = tokens * tokens, most = 0.0, limit = INFINITY;
    int64_t count = 0;
    *holder = -1;
    for (int64_t from = 0; from < nodes; from += CHUNK) {
        int64_t size = nodes - from < CHUNK ? nodes - from : CHUNK;
        for (int64_t j = 0; j < size; j++) {
            int64_t i = from + j;
            double at = open_at[i] > now ? open_at[i] : now;
            double cost = at + (a0[i] + a1[i] * tokens + a2[i] * squared);
            rank[j] = total[i] * block_size <= tokens ? INFINITY : cost;
        }
        if (matched) {
            const double *own = matched + from;
            for (int64_t j = 0; j < size; j++)
                rank[j] -= (a2[from + j] * own[j] + a1[from + j]) * own[j];
            for (int64_t j = 0; j < size; j++)
                if (own[j] > most) {
                    most = own[j];
                    *holder = from + j;
                }
        }
        for (int64_t j = 0; j < size; j++) {
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
