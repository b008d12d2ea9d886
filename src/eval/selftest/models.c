/* models.c - checkpoints and texts with logits from another implementation.
 *
 * Both suites feed tokens through the public interface, in one piece and token by
 * token, so they also show that prefill and decode agree. */
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/mem.h"
#include "eval/selftest/selftest.h"
#include "session/session.h"

/* Largest logit error allowed with float weights (of 16 bits: logit16), and the mean
 * error of a token's log-probability with quantized ones: the reference computes in
 * double what the other side computed in float; cpu quantizes activations to 8 bits;
 * cuda multiplies weights of 16 bits by activations rounded to half. */
typedef struct tolerance {
    const char *backend;
    double logit, logit16, logprob, perplexity;
    bool greedy; /* greedy continuations are compared token by token */
} tolerance;
static const tolerance tolerances[] = {
    {"ref", 2e-4, 2e-4, 1e-3, 1e-3, true},
    {"cpu", 1e-3, 1e-3, 2e-2, 5e-3, false},
    {"cuda", 1e-3, 3e-2, 2e-2, 5e-3, false},
};

static const tolerance *tolerance_of(const still_model *m)
{
    for (size_t i = 0; i < sizeof tolerances / sizeof *tolerances; i++)
        if (strcmp(tolerances[i].backend, m->be->name) == 0) return &tolerances[i];
    return &tolerances[1];
}

/* ---- Tiny checkpoints: all logits ---------------------------------------- */

typedef struct expected {
    sti_store store;
    const int32_t *ids;
    const float *logits; /* [n, vocab] */
    int n, vocab;
} expected;

static still_status expected_open(const char *folder, expected *e, still_error *err)
{
    char path[8192];
    snprintf(path, sizeof path, "%s/expected.safetensors", folder);
    STI_TRY(sti_store_open(path, &e->store, err));
    const sti_tensor *ids = sti_store_find(&e->store, "ids");
    const sti_tensor *logits = sti_store_find(&e->store, "logits");
    if (!ids || !logits || ids->type != STI_I32 || logits->type != STI_F32 ||
        ids->n_dims != 1 || logits->n_dims != 2 || logits->dim[0] != ids->dim[0] ||
        ids->dim[0] > 1 << 20 || logits->dim[1] > 1 << 20) {
        sti_store_close(&e->store);
        return sti_fail(
            err, STILL_E_FORMAT,
            "%s: expected tensors 'ids' [n] i32 and 'logits' [n, vocab] f32", path);
    }
    e->ids = ids->data;
    e->logits = logits->data;
    e->n = (int)ids->dim[0];
    e->vocab = (int)logits->dim[1];
    return STILL_OK;
}

static double max_error(const float *a, const float *b, size_t n)
{
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - b[i]);
        if (!(d <= worst)) worst = isnan(d) ? INFINITY : d;
    }
    return worst;
}

/* Logits of every token, fed `piece` tokens at a time. */
static still_status worst_logit(still_model *m, const expected *e, int piece,
                                double *worst, still_error *err)
{
    still_session *s;
    /* Keys and values in f32: what is tested is the arithmetic, not f16. */
    still_session_params p = {
        .size = sizeof p, .ctx = e->n, .batch = piece, .cache = "f32"};
    STI_TRY(still_session_new(m, &p, &s, err));
    still_status st = STILL_OK;
    *worst = 0;
    for (int at = 0; at < e->n && st == STILL_OK; at += piece) {
        int rows = e->n - at < piece ? e->n - at : piece;
        st = still_session_feed(s, e->ids + at, rows, err);
        for (int i = 0; i < rows && st == STILL_OK; i++) {
            st = sti_model_logits(m, i, 1, err);
            if (st == STILL_OK) st = sti_session_take_logits(s, 0, err);
            double d =
                max_error(s->logits, e->logits + (size_t)(at + i) * (size_t)e->vocab,
                          (size_t)e->vocab);
            if (d > *worst) *worst = d;
        }
    }
    still_session_free(s);
    return st;
}

/* GGUF has no key for what Gemma scales q . k by: config.json beside the file says it. */
static still_status read_attn_scale(const char *folder, double *out, still_error *err)
{
    char path[8192];
    json_t *config;
    snprintf(path, sizeof path, "%s/config.json", folder);
    STI_TRY(sti_json_load(path, &config, err));
    const double square =
        json_number_value(json_object_get(config, "query_pre_attn_scalar"));
    *out = square > 0 ? 1 / sqrt(square) : 0;
    json_decref(config);
    return STILL_OK;
}

/* The model at `path` against the logits in `folder`. */
static still_status run_checkpoint(const sti_suite_run *r, const char *name,
                                   const char *folder, const char *path,
                                   still_error *err)
{
    expected e = {0};
    STI_TRY(expected_open(folder, &e, err));
    still_model *m = NULL;
    still_model_params p = *r->p->model;
    still_status st = STILL_OK;
    if (path != folder) st = read_attn_scale(folder, &p.attn_scale, err);
    if (st == STILL_OK) st = still_model_open(path, &p, &m, err);
    if (st == STILL_OK && m->embed.type == STI_BF16) {
        /* The logits of bf16 checkpoints come from a model that was cast to bf16 whole,
         * RoPE table included, and computed in float after that. */
        still_model_free(m);
        p.rope_bf16 = true;
        st = still_model_open(path, &p, &m, err);
    }
    if (st == STILL_OK && m->cfg.vocab != e.vocab)
        st =
            sti_fail(err, STILL_E_FORMAT, "%s: model has %d tokens, expected logits %d",
                     folder, m->cfg.vocab, e.vocab);
    double prefill = 0, decode = 0;
    if (st == STILL_OK) st = worst_logit(m, &e, e.n, &prefill, err);
    if (st == STILL_OK) st = worst_logit(m, &e, 1, &decode, err);
    if (st == STILL_OK) {
        const tolerance *t = tolerance_of(m);
        double limit = m->layer[0].q.w.type == STI_F32 ? t->logit : t->logit16;
        still_check c[] = {{"prefill logit", prefill, limit, false},
                           {"decode logit", decode, limit, false}};
        sti_selftest_report(r, name, c, 2);
    }
    still_model_free(m);
    sti_store_close(&e.store);
    return st;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* A folder as Hugging Face's files have the model, and as a GGUF file in it has it. */
static still_status run_folder(const sti_suite_run *r, const char *name,
                               still_error *err)
{
    static const char *const GGUF = "model.f32.gguf";
    char folder[4096], path[4096 + 32], both[512];
    struct stat sb;
    snprintf(folder, sizeof folder, "%s/%s", r->dir, name);
    STI_TRY(run_checkpoint(r, name, folder, folder, err));
    snprintf(path, sizeof path, "%s/%s", folder, GGUF);
    if (stat(path, &sb) != 0) return STILL_OK;
    snprintf(both, sizeof both, "%s/%s", name, GGUF);
    return run_checkpoint(r, both, folder, path, err);
}

still_status sti_selftest_models(const sti_suite_run *r, still_error *err)
{
    DIR *d = opendir(r->dir);
    if (!d) return sti_fail(err, STILL_E_IO, "%s: cannot be read as a folder", r->dir);
    char *name[256];
    size_t n = 0;
    for (struct dirent *e; (e = readdir(d)) && n < 256;) {
        char path[4096];
        struct stat sb;
        snprintf(path, sizeof path, "%s/%s/config.json", r->dir, e->d_name);
        if (e->d_name[0] != '.' && stat(path, &sb) == 0 &&
            (name[n] = sti_strdup(e->d_name)))
            n++;
    }
    closedir(d);
    still_status st = n ? STILL_OK
                        : sti_fail(err, STILL_E_FORMAT,
                                   "%s: no folder in it has a config.json", r->dir);
    qsort(name, n, sizeof *name, by_name);
    for (size_t i = 0; i < n; i++) {
        if (st == STILL_OK) st = run_folder(r, name[i], err);
        free(name[i]);
    }
    return st;
}

/* ---- A real model on a text ---------------------------------------------- */

/* A JSON list of numbers as ids or floats; the caller frees. */
static still_status read_ids(const char *path, const json_t *list, const char *what,
                             int32_t **out, int *n, still_error *err)
{
    *n = (int)json_array_size(list);
    *out = NULL;
    if (!json_is_array(list) || *n < 2)
        return sti_fail(err, STILL_E_FORMAT, "%s: '%s' is not a list of ids", path,
                        what);
    if (!(*out = sti_alloc((size_t)*n, sizeof **out)))
        return sti_fail_memory(err, path, (size_t)*n * 4);
    for (int i = 0; i < *n; i++)
        (*out)[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    return STILL_OK;
}

/* The settings that a row of log-probabilities was made with, by the file's names. */
static still_status read_settings(const char *path, const json_t *j, still_method *out,
                                  still_error *err)
{
    const char *name = json_string_value(json_object_get(j, "method"));
    const char *scale = json_string_value(json_object_get(j, "la_scale"));
    const json_t *select = json_object_get(j, "lam"), *cap = json_object_get(j, "cap");
    int chunk = (int)json_integer_value(json_object_get(j, "C"));
    if (!name || chunk < 1)
        return sti_fail(err, STILL_E_FORMAT, "%s: settings without method or C", path);
    STI_TRY(still_method_init(out, name, chunk, err));
    if (json_is_integer(select)) out->select = (int)json_integer_value(select);
    if (json_is_integer(cap)) out->cap = (int)json_integer_value(cap);
    if (json_is_null(cap)) out->cap = -1;
    out->window_scale = scale && strcmp(scale, "window") == 0;
    out->per_head = !json_is_true(json_object_get(j, "share_k"));
    return STILL_OK;
}

/* One row: log-probabilities of the text under one method. */
static still_status check_row(const sti_suite_run *r, still_model *m, const char *path,
                              const char *name, const json_t *want,
                              const still_method *method, const int32_t *ids, int n,
                              still_error *err)
{
    still_session *s = NULL;
    float *got = sti_alloc((size_t)n, sizeof *got);
    still_status st = STILL_OK;
    if (!got)
        st = sti_fail_memory(err, path, (size_t)n * 4);
    else if (!json_is_array(want) || json_array_size(want) != (size_t)n - 1)
        st = sti_fail(err, STILL_E_FORMAT, "%s: '%s' is not a list of %d numbers", path,
                      name, n - 1);
    else
        st = still_session_new(
            m, &STILL_PARAMS(still_session_params, .ctx = n, .method = method), &s,
            err);
    if (st == STILL_OK) st = still_session_logprobs(s, ids, n, got, NULL, err);
    if (st == STILL_OK) {
        double sum = 0, ours = 0, theirs = 0;
        for (int i = 0; i < n - 1; i++) {
            double w = json_number_value(json_array_get(want, (size_t)i));
            sum += fabs(got[i] - w);
            ours += got[i];
            theirs += w;
        }
        const tolerance *tol = tolerance_of(m);
        still_check c[] = {{"mean logprob", sum / (n - 1), tol->logprob, false},
                           {"perplexity", fabs(exp((theirs - ours) / (n - 1)) - 1),
                            tol->perplexity, false}};
        sti_selftest_report(r, name, c, 2);
    }
    still_session_free(s);
    free(got);
    return st;
}

static still_status check_text(const sti_suite_run *r, still_model *m, const char *path,
                               json_t *root, still_error *err)
{
    int32_t *ids;
    int n;
    STI_TRY(
        read_ids(path, json_object_get(root, "token_ids"), "token_ids", &ids, &n, err));
    still_status st = check_row(r, m, path, "softmax", json_object_get(root, "softmax"),
                                NULL, ids, n, err);
    const char *name;
    json_t *settings;
    json_object_foreach(json_object_get(root, "settings"), name, settings)
    {
        still_method method;
        if (st == STILL_OK) st = read_settings(path, settings, &method, err);
        if (st == STILL_OK)
            st = check_row(r, m, path, name, json_object_get(root, name), &method, ids,
                           n, err);
    }
    free(ids);
    return st;
}

/* The number of tokens after which a greedy continuation differs from the expected
 * one. */
static still_status greedy_wrong(still_model *m, const int32_t *prompt, int n,
                                 const int32_t *want, int n_want, int *wrong,
                                 still_error *err)
{
    still_session *s = NULL;
    still_sampler *sp = NULL;
    int32_t id = 0;
    still_status st = still_session_new(
        m, &STILL_PARAMS(still_session_params, .ctx = n + n_want), &s, err);
    if (st == STILL_OK) st = still_sampler_new(NULL, m->cfg.vocab, &sp, err);
    if (st == STILL_OK) st = still_session_feed(s, prompt, n, err);
    int i = 0;
    for (; i < n_want && st == STILL_OK; i++) {
        st = still_sampler_sample(sp, still_session_logits(s), &id, err);
        if (st != STILL_OK || id != want[i]) break;
        st = still_session_feed(s, &id, 1, err);
    }
    *wrong = n_want - i;
    still_sampler_free(sp);
    still_session_free(s);
    return st;
}

static still_status check_greedy(const sti_suite_run *r, still_model *m,
                                 const char *path, const json_t *root, still_error *err)
{
    const json_t *all = json_object_get(root, "greedy");
    for (size_t i = 0; i < json_array_size(all); i++) {
        const json_t *g = json_array_get(all, i);
        int32_t *prompt = NULL, *want = NULL;
        int n = 0, n_want = 0, wrong = 0;
        still_status st = read_ids(path, json_object_get(g, "prompt_ids"), "prompt_ids",
                                   &prompt, &n, err);
        if (st == STILL_OK)
            st = read_ids(path, json_object_get(g, "ids"), "ids", &want, &n_want, err);
        if (st == STILL_OK) st = greedy_wrong(m, prompt, n, want, n_want, &wrong, err);
        if (st == STILL_OK) {
            char name[32];
            snprintf(name, sizeof name, "greedy %zu", i + 1);
            still_check c = {"wrong tokens", wrong, 0, false};
            sti_selftest_report(r, name, &c, 1);
        }
        free(prompt);
        free(want);
        STI_TRY(st);
    }
    return STILL_OK;
}

still_status sti_selftest_end_to_end(const sti_suite_run *r, still_error *err)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/smollm2.json", r->dir);
    json_t *root;
    STI_TRY(sti_json_load(path, &root, err));
    still_model *m = NULL;
    still_status st = STILL_OK;
    if (!r->p->model_path)
        st = sti_fail(err, STILL_E_ARG,
                      "%s: needs the model SmolLM2-135M-Instruct (still pull smollm2)",
                      path);
    if (st == STILL_OK) st = still_model_open(r->p->model_path, r->p->model, &m, err);
    if (st == STILL_OK) st = check_text(r, m, path, root, err);
    if (st == STILL_OK && tolerance_of(m)->greedy)
        st = check_greedy(r, m, path, root, err);
    still_model_free(m);
    json_decref(root);
    return st;
}
