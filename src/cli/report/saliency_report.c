/* saliency_report.c - see saliency.h. The figures are in the page as JSON, which other
 * programs can read: scores are arrays [layers x heads][tokens]. */
#include "cli/report/saliency.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/outputs.h"

double cli_saliency_exact(const still_saliency *s)
{
    const size_t n = (size_t)s->layers * (size_t)s->heads * (size_t)s->tokens;
    size_t exact = 0;
    for (size_t i = 0; i < n; i++) exact += s->folded[i] < 0;
    return (double)exact / (double)n;
}

/* Inside a script element "<" could end it; in JSON it occurs within strings only. */
static void put_json(sti_buf *out, json_t *value)
{
    char *text =
        sti_json_text(value, JSON_COMPACT | JSON_ENSURE_ASCII | JSON_ENCODE_ANY);
    out->failed = out->failed || !text;
    for (const char *at = text; at && *at;) {
        const size_t n = strcspn(at, "<");
        sti_buf_put(out, at, n);
        if (at[n]) sti_buf_puts(out, "\\u003c");
        at += n + (at[n] != 0);
    }
    free(text);
    json_decref(value);
}

static void put_number(sti_buf *out, double x, const char *format)
{
    char text[32];
    if (isfinite(x))
        snprintf(text, sizeof text, format, x);
    else
        snprintf(text, sizeof text, "null");
    sti_buf_puts(out, text);
}

static void put_scores(const still_saliency *s, const char *name, const float *x,
                       sti_buf *out)
{
    sti_buf_printf(out, ",\n\"%s\":[", name);
    for (int row = 0; row < s->layers * s->heads; row++) {
        sti_buf_puts(out, row ? ",\n[" : "[");
        for (int t = 0; t < s->tokens; t++) {
            if (t) sti_buf_puts(out, ",");
            put_number(out, (double)x[(size_t)row * (size_t)s->tokens + (size_t)t],
                       "%.3g");
        }
        sti_buf_puts(out, "]");
    }
    sti_buf_puts(out, "]");
}

static void put_folded(const still_saliency *s, sti_buf *out)
{
    sti_buf_puts(out, ",\n\"folded\":[");
    for (int row = 0; row < s->layers * s->heads; row++) {
        sti_buf_puts(out, row ? ",\n[" : "[");
        for (int t = 0; t < s->tokens; t++)
            sti_buf_printf(out, "%s%d", t ? "," : "",
                           s->folded[(size_t)row * (size_t)s->tokens + (size_t)t]);
        sti_buf_puts(out, "]");
    }
    sti_buf_puts(out, "]");
}

/* A row of the table. */
static void put_agreement(const still_agreement *whole, const still_agreement *received,
                          sti_buf *out)
{
    const double x[] = {whole->overlap, whole->correlation, received->overlap,
                        received->correlation, received->captured};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++) {
        sti_buf_puts(out, i ? "," : "[");
        put_number(out, x[i], "%.6g");
    }
    sti_buf_puts(out, "]");
}

static void put_agreements(const still_saliency *s, sti_buf *out)
{
    sti_buf_puts(out, ",\n\"mean\":");
    put_agreement(&s->mean_whole, &s->mean_received, out);
    sti_buf_puts(out, ",\n\"by_layer\":[");
    for (int l = 0; l < s->layers; l++) {
        if (l) sti_buf_puts(out, ",");
        put_agreement(&s->layer_whole[l], &s->layer_received[l], out);
    }
    sti_buf_puts(out, "]");
}

/* The text of each token. A character of several tokens belongs to the last of them;
 * those before it have a dot. */
static json_t *texts(const cli_saliency *r, still_error *err)
{
    still_decoder *d = NULL;
    json_t *list = json_array();
    still_status st = still_decoder_new(r->tk, true, &d, err);
    for (int i = 0; st == STILL_OK && i < r->s->tokens; i++) {
        const char *text;
        size_t n;
        st = still_decoder_push(d, r->ids[i], &text, &n, err);
        if (st == STILL_OK)
            sti_json_append(&list, n ? cli_json_text(text, n) : json_string("\u00b7"));
    }
    still_decoder_free(d);
    if (st == STILL_OK && !list)
        sti_fail_memory(err, "the text of tokens", (size_t)r->s->tokens);
    if (st == STILL_OK) return list;
    json_decref(list);
    return NULL;
}

static void put_data(const cli_saliency *r, json_t *tokens, sti_buf *out)
{
    const still_saliency *s = r->s;
    const still_method *m = &s->method;
    sti_buf_puts(out, "{\"model\":");
    put_json(out, cli_json_text(r->model, strlen(r->model)));
    sti_buf_puts(out, ",\"file\":");
    put_json(out, cli_json_text(r->file, strlen(r->file)));
    sti_buf_puts(out, ",\"method\":");
    put_json(out, json_pack("{s:s, s:s, s:i, s:i, s:i, s:s}", "name", m->name, "score",
                            m->score, "chunk", m->chunk, "select", m->select, "cap",
                            m->cap, "caps", m->caps));
    sti_buf_printf(out, ",\"first_layer\":%d,\"layers\":%d,\"heads\":%d,\"left\":%d",
                   s->first_layer, s->layers, s->heads, s->left);
    sti_buf_puts(out, ",\n\"tokens\":");
    put_json(out, tokens);
    put_scores(s, "local", s->local, out);
    put_scores(s, "whole", s->whole, out);
    put_scores(s, "received", s->received, out);
    put_folded(s, out);
    put_agreements(s, out);
    sti_buf_puts(out, "}\n");
}

int cli_saliency_write(const cli_saliency *r, const char *path)
{
    still_error err;
    sti_buf page = {0};
    json_t *tokens = texts(r, &err);
    if (!tokens) return cli_fail_error(&err);
    for (int i = 0; cli_saliency_page[i]; i++)
        sti_buf_printf(&page, "%s\n", cli_saliency_page[i]);
    put_data(r, tokens, &page);
    for (int i = 0; cli_saliency_page_end[i]; i++)
        sti_buf_printf(&page, "%s\n", cli_saliency_page_end[i]);
    const int status = cli_write(path, &page);
    sti_buf_free(&page);
    return status;
}
