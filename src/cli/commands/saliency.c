/* saliency.c - still saliency: which tokens of a text stay exact, and whether a
 * score that sees only a window selects those that matter later. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/fetch/cache.h"
#include "cli/progress.h"
#include "cli/report/figures.h"
#include "cli/run.h"

enum { MOST_TOKENS = 2048 }; /* unless --ctx says otherwise */

/* ---- Standard output ----------------------------------------------------- */

static json_t *agreement(const still_agreement *a)
{
    return json_pack("{s:f, s:o, s:f}", "overlap", a->overlap, "correlation",
                     isnan(a->correlation) ? json_null() : json_real(a->correlation),
                     "captured", a->captured);
}

static json_t *pair(const still_agreement *whole, const still_agreement *received)
{
    return json_pack("{s:o, s:o}", "whole", agreement(whole), "received",
                     agreement(received));
}

/* A layer's means, and its heads. */
static json_t *of_layer(const still_saliency *s, int l)
{
    json_t *layer = pair(&s->layer_whole[l], &s->layer_received[l]),
           *heads = json_array();
    for (int i = l * s->heads; i < (l + 1) * s->heads; i++)
        sti_json_append(&heads, pair(&s->with_whole[i], &s->with_received[i]));
    sti_json_set(&layer, "layer", json_integer(s->first_layer + l));
    sti_json_set(&layer, "heads", heads);
    return layer;
}

/* Classes of words, and what every score captures. */
static json_t *of_figures(const cli_figures *f)
{
    json_t *classes = json_object(), *scores = json_object();
    for (int i = 0; i < CLI_WORD_CLASSES; i++)
        sti_json_set(&classes, cli_word_class_name((cli_word_class)i),
                     json_pack("{s:f, s:f}", "text", f->words.in_text[i], "kept",
                               f->words.in_kept[i]));
    for (int i = 0; i < f->curves; i++)
        sti_json_set(&scores, f->curve_name[i], json_real(f->here[i]));
    return json_pack("{s:o, s:o}", "classes", classes, "captured_by", scores);
}

static int print_json(const cli_saliency *r, const cli_figures *f, double seconds)
{
    const still_saliency *s = r->s;
    const still_method *m = &s->method;
    json_t *all = json_pack(
        "{s:o, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:f}", "model",
        cli_json_text(r->model, strlen(r->model)), "method", m->name, "score", m->score,
        "tokens", s->tokens, "chunk", m->chunk, "select", m->select, "cap", m->cap,
        "chunks", s->left / m->chunk - 1, "chance", (double)m->select / m->chunk,
        "exact", cli_saliency_exact(s), "seconds", seconds);
    json_t *mean = pair(&s->mean_whole, &s->mean_received), *layers = json_array();
    for (int l = 0; l < s->layers; l++) sti_json_append(&layers, of_layer(s, l));
    if (m->caps[0]) sti_json_set(&all, "caps", json_string(m->caps));
    sti_json_merge(&all, mean);
    sti_json_set(&all, "layers", layers);
    if (f) sti_json_merge(&all, of_figures(f));
    return cli_print_json(all);
}

static void print_row(const char *name, const still_agreement *whole,
                      const still_agreement *received)
{
    cli_print("| %s | %.3f | %.3f | %.3f | %.3f | %.3f |\n", name, whole->overlap,
              whole->correlation, received->overlap, received->correlation,
              received->captured);
}

static void print_classes(const cli_words *w)
{
    cli_print("\n| tokens | of the text | of those kept | ratio |\n|-|-:|-:|-:|\n");
    for (int i = 0; i < CLI_WORD_CLASSES; i++)
        if (w->in_text[i] > 0)
            cli_print("| %s | %.1f%% | %.1f%% | %.2f |\n",
                      cli_word_class_name((cli_word_class)i), 100 * w->in_text[i],
                      100 * w->in_kept[i], w->in_kept[i] / w->in_text[i]);
}

static int print_table(const still_saliency *s, const cli_figures *f)
{
    const still_method *m = &s->method;
    cli_print(
        "%d tokens, %.1f%% exact at the end; of a chunk of %d, %d are chosen by %s "
        "(overlap by chance %.3f)\n\n",
        s->tokens, 100 * cli_saliency_exact(s), m->chunk, m->select, m->score,
        (double)m->select / m->chunk);
    cli_print("| layer | whole past: overlap | rank | received later: overlap | rank | "
              "captured |\n");
    cli_print("|-:|-:|-:|-:|-:|-:|\n");
    for (int l = 0; l < s->layers; l++) {
        char name[16];
        snprintf(name, sizeof name, "%d", s->first_layer + l);
        print_row(name, &s->layer_whole[l], &s->layer_received[l]);
    }
    print_row("all", &s->mean_whole, &s->mean_received);
    if (f) print_classes(&f->words);
    return CLI_OK;
}

/* ---- The command --------------------------------------------------------- */

/* Files first, so that what standard output says has happened. */
static int report(const cli_options *o, const cli_saliency *r, double seconds)
{
    still_error err;
    cli_figures f = {0};
    int status = o->out ? cli_saliency_write(r, o->out) : CLI_OK;
    if (status == CLI_OK && o->figures) {
        if (cli_figures_compute(r, &f, &err)) status = cli_fail_error(&err);
        if (status == CLI_OK) status = cli_figures_write(r, &f, o->figures);
    }
    const cli_figures *drawn = o->figures ? &f : NULL;
    if (status == CLI_OK && !o->to_stdout)
        status = o->json ? print_json(r, drawn, seconds) : print_table(r->s, drawn);
    cli_figures_free(&f);
    return status;
}

static int measure(const cli_options *o, still_model *m, cli_saliency *r, int n)
{
    still_error err;
    still_method method;
    still_saliency *s = NULL;
    cli_progress bar;
    cli_options asked = *o; /* softmax, the default of plain models, selects nothing */
    if (!o->method && !still_model_get_info(m)->method) asked.method = "still";
    asked.no_allocate = true; /* caps do not matter within a chunk */
    int status = cli_read_method(&asked, m, &method);
    if (status != CLI_OK) return status;
    if (method.select >= method.chunk)
        cli_warn(
            "all %d tokens of a chunk are selected, so every score chooses the same; "
            "--select %d would choose",
            method.chunk, method.chunk > 4 ? method.chunk / 4 : 1);
    const double start = cli_now();
    cli_progress_begin(&bar, o->quiet, "saliency", "layers", 0, 0);
    const still_saliency_params p = {.size = sizeof p,
                                     .method = &method,
                                     .progress = cli_progress_tick,
                                     .user = &bar,
                                     .all_scores = o->figures != NULL};
    const still_status ran = still_saliency_run(m, r->ids, n, &p, &s, &err);
    cli_progress_end(&bar);
    if (ran != STILL_OK) return cli_fail_error(&err);
    r->s = s;
    status = report(o, r, cli_now() - start);
    still_saliency_free(s);
    return status;
}

static int run(const cli_options *o, still_model *m, const char *text, size_t n_text)
{
    int32_t *ids = NULL;
    size_t n = 0;
    cli_saliency r = {.model = o->n_args == 2 ? o->arg[0] : cli_default_model(o),
                      .file = o->arg[o->n_args - 1]};
    const int64_t trained = still_model_get_info(m)->ctx_train;
    int64_t most = trained && trained < MOST_TOKENS ? trained : MOST_TOKENS;
    if (o->ctx) most = o->ctx;
    int status = cli_need_tokenizer(m, &r.tk);
    if (status == CLI_OK)
        status = cli_encode(r.tk, text, n_text, STILL_ENCODE_BOS, &ids, &n);
    if (status == CLI_OK && n == 0) status = cli_fail("%s: holds no text", r.file);
    r.ids = ids;
    if (status == CLI_OK)
        status = measure(o, m, &r, (int)(n < (size_t)most ? n : (size_t)most));
    free(ids);
    return status;
}

int cli_cmd_saliency(const cli_options *o)
{
    return cli_run_on_text(o, run);
}
