/* The choice of a prefill node and a decode node among a few, Algorithm 1 in plain loops. The reference is find_few of
   sched/placement/few.py: the same sums in the same order, so both find the same nodes and estimates. */

#include <math.h>
#include <stdint.h>

enum { A0, A1, A2, OPEN_AT, WORK_UNTIL, CLOSED, WAITING, RUNNING, QUEUED, FREE, TOTAL, STEP, SOON, TOLLED = 16 };
/* Rows of a view's table. */
static const double TOLL_OF_PROMPT = 0.125, PROMPT_TOLL_MOST = 4.0, TOLL_OF_QUEUE = 20.0, TOLL_OF_FIRST = 1.0;
/* Of sched/placement/view.py. */
enum { MAX_NODES = 48 }; /* of sched/placement/few.py */
enum { MAX_OUTPUT_TOKENS = 256 }; /* of sched/placement/demand.py */

/* The question, the answer, and the best nodes of a stage, which are equals. engine/front/compiled/choose.py reads
   and writes it as 13 and 8 doubles and MAX_NODES integers. */
static struct choice {
    double nodes, now, num_tokens, max_tokens, pool_tokens, block_size, threshold, token_bytes, ssd_s, kv_token_bytes;
    double has_paths; /* from the pool */
    double dram_tokens, other_blocks;
    double prefix, fetches, waiting, wait_s, transfer_s, prefill_s, handover_s, step_s;
    int64_t able[MAX_NODES];
} choice, *const c = &choice;

/* What follows from the question: see sched/placement/demand.py. */
static int64_t nodes;
static double n, block_size, pooled, near, most_local, most_near, kv_bytes, output, need;

struct choice *choose_place(void) { return &choice; }

static void derive(void)
{
    int64_t tokens = (int64_t)c->num_tokens, most = (int64_t)c->max_tokens, size = (int64_t)c->block_size;
    int64_t out = most < MAX_OUTPUT_TOKENS ? most : MAX_OUTPUT_TOKENS, usable = (tokens - 1) / size * size;
    int64_t found = c->has_paths != 0.0 ? (int64_t)c->pool_tokens / size * size : 0;
    nodes = (int64_t)c->nodes;
    n = c->num_tokens;
    block_size = c->block_size;
    pooled = (double)(found < usable ? found : usable);
    int64_t warm = (int64_t)c->dram_tokens / size * size;
    near = c->ssd_s == 0.0 || (double)warm > pooled ? pooled : (double)warm;
    most_local = pooled > 0.0 ? fmax(pooled / c->threshold, 1.0) : 0.0;
    most_near = near > 0.0 ? fmax(near / c->threshold, 1.0) : 0.0;
    kv_bytes = n * c->kv_token_bytes;
    output = (double)out;
    need = (double)((tokens + out + size - 1) / size) + c->other_blocks;
}

/* Tokens that node i has after a fetch; 0 if it does not fetch. It reads the part on SSD if that is there before it has
   computed it. */
static double reach_of(double a1, double a2, double own, double token_s)
{
    if (own >= most_local)
        return 0.0;
    double known = own > near ? own : near;
    if (c->ssd_s == 0.0 || (a1 + a2 * (pooled + known) - token_s) * (pooled - known) > c->ssd_s)
        return pooled;
    return own < most_near ? near : 0.0;
}

/* Seconds of the prefill on node i without its queue, after its own prefix; *reach > 0: it may fetch *reach tokens in
   *fetch_s, and then the prefill takes *rest_s. */
static double prefill_s(const double *table, int64_t i, double own, const double *fetched,
                        double *rest_s, double *fetch_s, double *reach)
{
    double a0 = table[A0 * nodes + i], a1 = table[A1 * nodes + i], a2 = table[A2 * nodes + i];
    double own_s = a0 + a1 * n + a2 * (n * n);
    own_s -= (a2 * own + a1) * own;
    *reach = *rest_s = *fetch_s = 0.0;
    if (own < most_local) {
        double token_s = fetched[2 * i + 1] * c->token_bytes;
        *reach = reach_of(a1, a2, own, token_s);
        *fetch_s = (*reach - own) * token_s + fetched[2 * i];
        if (c->ssd_s != 0.0 && *reach == pooled && *reach != near)
            *fetch_s += c->ssd_s;
        *rest_s = a0 + a1 * (n - *reach) + a2 * (n * n - *reach * *reach);
    }
    return own_s;
}

/* Nodes of least TTFT into `able`; returns how many, 0 if no node can prefill or none can decode.
   table [17, nodes]; matched [nodes]; fetched [nodes, 2]: latency and seconds per byte. */
int64_t choose_prefill(const double *table, const double *matched, const double *fetched)
{
    int64_t count = 0, decodes = 0;
    double best = INFINITY, rest_s, fetch_s, reach;
    derive();
    for (int64_t i = 0; i < nodes; i++) {
        if (table[TOTAL * nodes + i] * block_size <= n)
            continue;
        decodes += table[CLOSED * nodes + i] == 0.0;
        double wait_s = table[OPEN_AT * nodes + i] - c->now;
        double ttft_s = prefill_s(table, i, matched[i], fetched, &rest_s, &fetch_s, &reach);
        if (reach > 0.0 && fetch_s + rest_s < ttft_s)
            ttft_s = fetch_s + rest_s;
        double toll = TOLL_OF_PROMPT * table[RUNNING * nodes + i];
        toll = (toll < PROMPT_TOLL_MOST ? toll : PROMPT_TOLL_MOST) * table[TOLLED * nodes + i];
        double toll_s = ttft_s * toll;
        if (wait_s > 0.0)
            ttft_s += wait_s;
        ttft_s += toll_s;
        if (ttft_s < best) {
            best = ttft_s;
            count = 0;
        }
        if (ttft_s == best && ttft_s < INFINITY)
            c->able[count++] = i;
    }
    return decodes ? count : 0;
}

/* The estimates of a prefill on `source` and a decode on `target`. */
void choose_estimates(const double *table, const double *matched, const double *fetched, int64_t source,
                      int64_t target, const double *handed_over)
{
    double own = matched[source], rest_s, fetch_s, reach, until = table[WORK_UNTIL * nodes + source];
    c->waiting = table[WAITING * nodes + source];
    c->wait_s = until > c->now ? until - c->now : 0.0;
    c->prefill_s = prefill_s(table, source, own, fetched, &rest_s, &fetch_s, &reach);
    c->fetches = reach > 0.0 && fetch_s + rest_s < c->prefill_s;
    c->transfer_s = c->fetches ? fetch_s : 0.0;
    c->prefix = c->fetches ? reach : own;
    if (c->fetches)
        c->prefill_s = rest_s;
    c->handover_s = target == source ? 0.0 : handed_over[2 * target] + handed_over[2 * target + 1] * kv_bytes;
    c->step_s = table[STEP * nodes + target];
}

/* Nodes of least time to decode after a prefill on `source` into `able`, if none has room the roomiest; returns how
   many. If it is one, the estimates are there too. handed_over [nodes, 2]: latency and seconds per byte. */
int64_t choose_decode(const double *table, const double *matched, const double *fetched, int64_t source,
                      const double *handed_over)
{
    int64_t count = 0, roomiest = 0;
    double best = INFINITY, room = -INFINITY;
    for (int64_t i = 0; i < nodes; i++) {
        if (table[CLOSED * nodes + i] != 0.0 || table[TOTAL * nodes + i] * block_size <= n)
            continue;
        double free = table[FREE * nodes + i], step = table[STEP * nodes + i], soon = table[SOON * nodes + i];
        if (free >= need) {
            double output_s = (step > soon ? step : soon) * output, decode_s = output_s;
            if (i != source)
                decode_s += handed_over[2 * i] + handed_over[2 * i + 1] * kv_bytes;
            double pays = table[TOLLED * nodes + i];
            decode_s += TOLL_OF_QUEUE * (table[A1 * nodes + i] * table[QUEUED * nodes + i]) * pays;
            decode_s += output_s * (table[RUNNING * nodes + i] == 0.0 ? TOLL_OF_FIRST * pays : 0.0);
            if (decode_s < best) {
                best = decode_s;
                count = 0;
            }
            if (decode_s == best)
                c->able[count++] = i;
        } else if (free > room) {
            roomiest = i;
            room = free;
        }
    }
    if (!count)
        c->able[count++] = roomiest;
    if (count == 1)
        choose_estimates(table, matched, fetched, source, c->able[0], handed_over);
    return count;
}
