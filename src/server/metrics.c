/* metrics.c - see metrics.h. The text format is Prometheus' (version 0.0.4). */
#include "server/metrics.h"

#include <math.h>
#include <stdio.h>

#include "base/process.h"

static const int codes[SRV_CODES] = {200, 204, 304, 400, 401, 403, 404,
                                     405, 413, 415, 429, 500, 503};

void srv_count(srv_counts *c, size_t route, int status)
{
    for (size_t i = 0; i < SRV_CODES; i++)
        if (codes[i] == status)
            atomic_fetch_add(
                &c->n[route < SRV_MOST_ROUTES ? route : SRV_MOST_ROUTES - 1][i], 1);
}

static void head(sti_buf *b, const char *name, const char *type, const char *help)
{
    sti_buf_printf(b, "# HELP still_%s %s\n# TYPE still_%s %s\n", name, help, name,
                   type);
}

static void number(sti_buf *b, const char *name, const char *type, const char *help,
                   double value)
{
    head(b, name, type, help);
    sti_buf_printf(b, "still_%s %.17g\n", name, value);
}

static void put_requests(sti_buf *b, srv_counts *c, const char *const *path, size_t n)
{
    head(b, "requests_total", "counter", "HTTP requests by path and status.");
    for (size_t i = 0; i < SRV_MOST_ROUTES; i++)
        for (size_t k = 0; k < SRV_CODES; k++) {
            unsigned long long count = atomic_load(&c->n[i][k]);
            if (count)
                sti_buf_printf(b,
                               "still_requests_total{path=\"%s\",code=\"%d\"} %llu\n",
                               i < n ? path[i] : "other", codes[k], count);
        }
    number(b, "requests_active", "gauge", "HTTP requests in progress.",
           atomic_load(&c->active));
}

static void put_steps(sti_buf *b, const srv_metrics *m)
{
    unsigned long long sum = 0;
    head(b, "step_seconds", "histogram",
         "Time of decode steps, one token of each sequence.");
    for (int i = 0; i < SRV_STEP_BUCKETS; i++) {
        char bound[32] = "+Inf";
        sum += m->step_count[i];
        if (isfinite(srv_step_bounds[i]))
            snprintf(bound, sizeof bound, "%g", srv_step_bounds[i]);
        sti_buf_printf(b, "still_step_seconds_bucket{le=\"%s\"} %llu\n", bound, sum);
    }
    sti_buf_printf(b, "still_step_seconds_sum %.9g\nstill_step_seconds_count %llu\n",
                   m->step_seconds, (unsigned long long)m->steps);
}

static void put_cache(sti_buf *b, const srv_metrics *m)
{
    number(b, "prefix_cache_hits_total", "counter",
           "Prompts that began with a text that was kept.", (double)m->cache_hits);
    number(b, "prefix_cache_misses_total", "counter", "Prompts that did not.",
           (double)m->cache_misses);
    number(b, "prefix_cache_entries", "gauge", "Texts that are kept in memory.",
           m->cache_pasts);
    number(b, "prefix_cache_bytes", "gauge", "Memory that they take.",
           (double)m->cache_bytes);
    number(b, "prefix_cache_limit_bytes", "gauge", "Memory that they may take.",
           (double)m->cache_limit);
    number(b, "prefix_cache_evictions_total", "counter",
           "Texts that made room for others.", (double)m->cache_given_up);
    if (!m->has_disk) return;
    number(b, "prefix_disk_hits_total", "counter",
           "Prompts that began with a text of the folder.", (double)m->disk.found);
    number(b, "prefix_disk_entries", "gauge", "Texts in the folder.", m->disk.pasts);
    number(b, "prefix_disk_bytes", "gauge", "Bytes of their files.",
           (double)m->disk.bytes);
    number(b, "prefix_disk_writes_total", "counter", "Texts put there.",
           (double)m->disk.written);
    number(b, "prefix_disk_failures_total", "counter",
           "Texts that could not be put there.", (double)m->disk.failed);
    number(b, "prefix_disk_evictions_total", "counter",
           "Texts of the folder that made room for others.", (double)m->disk.removed);
}

void srv_metrics_put(sti_buf *b, srv_counts *c, const char *const *path, size_t n,
                     const srv_metrics *m)
{
    static const char *const reasons[SRV_FINISHES] = {[SRV_STOP] = "stop",
                                                      [SRV_LENGTH] = "length",
                                                      [SRV_CANCELLED] = "cancelled",
                                                      [SRV_FAILED] = "failed"};
    put_requests(b, c, path, n);
    number(b, "generations_total", "counter", "Requests that the scheduler took.",
           (double)m->requests);
    number(b, "refused_total", "counter",
           "Requests refused because the queue was full.", (double)m->refused);
    head(b, "sequences_total", "counter", "Sequences by how they ended.");
    for (int i = 0; i < SRV_FINISHES; i++)
        sti_buf_printf(b, "still_sequences_total{reason=\"%s\"} %llu\n", reasons[i],
                       (unsigned long long)m->finished[i]);
    number(b, "prompt_tokens_total", "counter", "Tokens of prompts.",
           (double)m->prompt_tokens);
    number(b, "cached_tokens_total", "counter",
           "Tokens of prompts that were not computed.", (double)m->cached_tokens);
    number(b, "generated_tokens_total", "counter", "Tokens of answers.",
           (double)m->made_tokens);
    put_cache(b, m);
    number(b, "sequences_capacity", "gauge", "Sequences that run at once.",
           m->parallel);
    number(b, "sequences_active", "gauge", "Sequences that run now.", m->active);
    number(b, "queue_requests", "gauge", "Requests that wait.", m->queued);
    put_steps(b, m);
    number(b, "prompt_seconds_total", "counter", "Time spent on prompts.",
           m->prompt_seconds);
    number(b, "resident_bytes", "gauge", "Memory of the process.", (double)sti_rss());
}
