/* perplexity.c - still perplexity: how well a model predicts a text, by position too. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "cli/ids.h"
#include "cli/progress.h"
#include "cli/run.h"

enum { MOST_WINDOW = 2048 };

typedef struct watch {
    cli_progress bar;
    still_perplexity running; /* kept up to date by the library */
} watch;

static bool tick(void *user, uint64_t done, uint64_t total)
{
    watch *w = user;
    if (w->running.n)
        snprintf(w->bar.note, sizeof w->bar.note, "perplexity %.4f", w->running.value);
    return cli_progress_tick(&w->bar, done, total);
}

/* Perplexity by position in the window, in `parts` equal parts; of the text, where that
 * is shorter than the window. */
static json_t *by_position(const float *each, size_t n, int64_t ctx, int64_t parts)
{
    json_t *list = json_array();
    const int64_t longest = (int64_t)n < ctx ? (int64_t)n : ctx;
    for (int64_t p = 0; p < parts; p++) {
        int64_t lo = longest * p / parts, hi = longest * (p + 1) / parts;
        double sum = 0;
        int64_t count = 0;
        for (size_t i = 0; i < n; i++) {
            int64_t at = (int64_t)(i % (size_t)ctx);
            if (at < lo || at >= hi || isnan(each[i])) continue;
            sum -= (double)each[i];
            count++;
        }
        if (count == 0) continue;
        sti_json_append(&list,
                        json_pack("{s:I, s:I, s:I, s:f}", "from", (json_int_t)lo, "to",
                                  (json_int_t)hi, "tokens", (json_int_t)count,
                                  "perplexity", exp(sum / (double)count)));
    }
    return list;
}

static int print_perplexity(const cli_options *o, const still_perplexity *p,
                            int64_t ctx, double seconds, json_t *positions)
{
    if (o->by_position && !positions) return cli_fail("out of memory");
    if (o->json) {
        json_t *object = json_pack("{s:f, s:f, s:f, s:I, s:i, s:I, s:f}", "perplexity",
                                   p->value, "stderr", p->stderr_, "nll", p->nll,
                                   "tokens", (json_int_t)p->n, "windows", p->windows,
                                   "ctx", (json_int_t)ctx, "seconds", seconds);
        if (positions) sti_json_set(&object, "by_position", positions);
        return cli_print_json(object);
    }
    size_t i;
    json_t *part;
    json_array_foreach(positions, i, part)
    {
        cli_print("tokens %8lld to %8lld  perplexity %9.4f  (%lld)\n",
                  json_integer_value(json_object_get(part, "from")),
                  json_integer_value(json_object_get(part, "to")),
                  json_real_value(json_object_get(part, "perplexity")),
                  json_integer_value(json_object_get(part, "tokens")));
    }
    json_decref(positions);
    cli_print("perplexity %.4f +- %.4f  (%llu tokens in %d windows of %lld)\n",
              p->value, p->stderr_, (unsigned long long)p->n, p->windows,
              (long long)ctx);
    return CLI_OK;
}

static int measure(const cli_options *o, still_model *m, const char *text,
                   size_t n_text)
{
    still_error err;
    const still_tokenizer *tk;
    still_session *session = NULL;
    int32_t *ids = NULL;
    size_t n = 0;
    int64_t trained = still_model_get_info(m)->ctx_train;
    int64_t ctx = o->ctx                             ? o->ctx
                  : trained && trained < MOST_WINDOW ? trained
                                                     : MOST_WINDOW;
    int status = cli_need_tokenizer(m, &tk);
    if (status == CLI_OK)
        status = cli_encode(tk, text, n_text, STILL_ENCODE_BOS, &ids, &n);
    if (status == CLI_OK && n < 2)
        status = cli_fail("%s: has %zu tokens, at least 2 are needed",
                          o->arg[o->n_args - 1], n);
    if (status == CLI_OK) status = cli_open_session(o, m, ctx, &session);
    if (status == CLI_OK) {
        watch w = {0};
        float *each = o->by_position ? sti_alloc(n, sizeof *each) : NULL;
        if (o->by_position && !each) {
            still_session_free(session);
            free(ids);
            return cli_fail("out of memory: %zu tokens", n);
        }
        double start = cli_now();
        cli_progress_begin(&w.bar, o->quiet, "perplexity", "tok", 0, n);
        still_status ran = still_perplexity_run(session, ids, n, (int)ctx, each, tick,
                                                &w, &w.running, &err);
        cli_progress_end(&w.bar);
        json_t *positions =
            each && ran == STILL_OK ? by_position(each, n, ctx, o->by_position) : NULL;
        status = ran == STILL_OK ? print_perplexity(o, &w.running, ctx,
                                                    cli_now() - start, positions)
                                 : cli_fail_error(&err);
        free(each);
    }
    still_session_free(session);
    free(ids);
    return status;
}

int cli_cmd_perplexity(const cli_options *o)
{
    return cli_run_on_text(o, measure);
}
