/* run.c - see run.h. */
#include "cli/run.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/error.h"
#include "base/mem.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/resolve.h"
#include "cli/progress.h"
#include "cli/stream.h"

static const size_t MOST_INPUT = (size_t)1 << 30; /* bytes of a text in a pipe */

const char *cli_default_model(const cli_options *o)
{
    return o->default_model ? o->default_model : CLI_DEFAULT_MODEL;
}

int cli_model_params(const cli_options *o, still_model_params *out)
{
    *out = STILL_PARAMS(still_model_params, .backend = o->backend,
                        .threads = (int)o->threads, .isa = o->isa,
                        .no_merge = o->no_merge);
    if (!o->gpu_memory) return CLI_OK;
    if (strcmp(o->backend, "cuda") != 0)
        return cli_usage(NULL, "--gpu-memory is for --backend cuda");
    cli_read_bytes(o->gpu_memory, &out->gpu_memory);
    return CLI_OK;
}

int cli_open_model(const cli_options *o, const char *name, still_model **out)
{
    still_error err;
    char *path, *adapter;
    still_model_params params;
    *out = NULL;
    int status = cli_model_params(o, &params);
    if (status != CLI_OK) return status;
    if (cli_resolve_model(name ? name : cli_default_model(o), &path, &adapter, &err))
        return cli_fail_error(&err);
    params.adapter = adapter;
    const cli_signals before = cli_signals_mode(CLI_SIGNALS_AT_ONCE);
    const still_status opened = cli_interrupted()
                                    ? sti_fail(&err, STILL_E_CANCELLED, "interrupted")
                                    : still_model_open(path, &params, out, &err);
    cli_signals_mode(before);
    if (opened != STILL_OK) status = cli_fail_error(&err);
    free(path);
    free(adapter);
    return status;
}

/* A whole number at *text, which moves past it. */
static bool read_int(const char **text, int *out)
{
    char *end;
    if (**text < '0' || **text > '9') return false;
    long v = strtol(*text, &end, 10);
    if (v > INT_MAX) return false;
    *out = (int)v;
    *text = end;
    return true;
}

/* Whether heads get caps of their own: still on a model without an adapter, or on any
 * with --budget, unless caps are given, there are none to choose, or nothing to probe
 * with. */
static bool allocates(const cli_options *o, const still_model *m)
{
    const still_method *trained = m ? still_model_get_info(m)->method : NULL;
    const char *name = o->method ? o->method : trained ? trained->name : "";
    return m && (!trained || o->budget) && still_model_tokenizer(m) &&
           strcmp(name, "still") == 0 && !o->no_allocate && !o->cap && o->select != 0 &&
           !(o->heads && strcmp(o->heads, "per-head") == 0);
}

/* The method that options then modify: the adapter's if there is one, else a preset. */
static still_status start_method(const cli_options *o, const still_model *m,
                                 still_method *out, still_error *err)
{
    const still_method *trained = m ? still_model_get_info(m)->method : NULL;
    if (!trained && allocates(o, m))
        return still_method_untrained(out, (int)o->chunk, err);
    if (!trained || (o->method && strcmp(o->method, trained->name) != 0))
        return still_method_init(out, o->method ? o->method : "softmax", (int)o->chunk,
                                 err);
    *out = *trained;
    if (o->chunk) out->chunk = (int)o->chunk;
    if (out->select > out->chunk) out->select = out->chunk;
    return STILL_OK;
}

int cli_cache_bits(const char *type)
{
    return type && type[0] == 'q' ? type[1] - '0' : 0;
}

/* Caps for the heads of a model: a minute the first time, then a file in the cache. */
static int give_caps(const cli_options *o, still_model *m, still_method *method)
{
    cli_options usual = *o; /* the same probes whatever else is drawn at random */
    still_allocation *a;
    usual.seed = 0;
    int status = cli_allocate(&usual, m, method, &a);
    if (status == CLI_OK) *method = a->method;
    still_allocation_free(a);
    return status;
}

size_t cli_budget(const cli_options *o)
{
    size_t n = 0;
    if (o->budget) cli_read_bytes(o->budget, &n);
    return n;
}

int cli_change_method(const cli_options *o, still_method *out)
{
    const char *at = o->cap;
    if (o->select >= 0) out->select = (int)o->select;
    if (o->cap) out->caps[0] = 0;
    if (o->cap && strcmp(o->cap, "none") == 0)
        out->cap = -1;
    else if (o->cap && (!read_int(&at, &out->cap) || (*at && *at != ',') ||
                        snprintf(out->caps, sizeof out->caps, "%s",
                                 at + (*at == ',')) >= (int)sizeof out->caps))
        return cli_usage(
            NULL,
            "--cap: '%s' is neither a number of tokens, nor one with those "
            "of layers or heads that differ (96,17-18:768,23/0:3840), nor "
            "'none'",
            o->cap);
    if (o->score) snprintf(out->score, sizeof out->score, "%s", o->score);
    if (o->cache_type_k) out->key_bits = cli_cache_bits(o->cache_type_k);
    if (o->cache_type_v) out->value_bits = cli_cache_bits(o->cache_type_v);
    if (o->heads) out->per_head = strcmp(o->heads, "per-head") == 0;
    if (o->la_scale) out->window_scale = strcmp(o->la_scale, "window") == 0;
    if (o->state) out->forget = strcmp(o->state, "none") == 0;
    if (o->gate) out->gate = strcmp(o->gate, "full") == 0;
    if (o->plain_map) out->norm_preserved = false;
    at = o->layers;
    if (o->layers && (!read_int(&at, &out->first_layer) || *at++ != '-' ||
                      !read_int(&at, &out->last_layer) || *at))
        return cli_usage(NULL, "--layers: '%s' is not a range such as 0-29", o->layers);
    if (o->positions && strcmp(o->positions, "absolute") == 0)
        out->positions = STILL_POSITIONS_ABSOLUTE;
    if (o->positions && strcmp(o->positions, "capped") == 0)
        out->positions = STILL_POSITIONS_CAPPED;
    return CLI_OK;
}

/* Options of the method have no effect where a model keeps its own attention. */
static void warn_unused(const cli_options *o, const still_method *method)
{
    const struct {
        bool given;
        const char *name;
    } option[] = {{o->chunk != 0, "chunk"},         {o->select >= 0, "select"},
                  {o->cap != NULL, "cap"},          {o->score != NULL, "score"},
                  {o->heads != NULL, "heads"},      {o->la_scale != NULL, "la-scale"},
                  {o->gate != NULL, "gate"},        {o->plain_map, "plain-map"},
                  {o->state != NULL, "state"},      {o->layers != NULL, "layers"},
                  {o->budget != NULL, "budget"},    {o->cache_type_k, "cache-type-k"},
                  {o->cache_type_v, "cache-type-v"}};
    char list[256] = "";
    size_t n = 0;
    if (o->method || strcmp(method->name, "softmax") != 0) return;
    for (size_t i = 0; i < sizeof option / sizeof *option && n < sizeof list; i++)
        if (option[i].given)
            n += (size_t)snprintf(list + n, sizeof list - n, "%s--%s", n ? ", " : "",
                                  option[i].name);
    if (n)
        cli_warn(
            "no effect: %s; this model keeps its softmax attention unless --method "
            "still, or another, is given",
            list);
}

int cli_read_uncapped(const cli_options *o, const still_model *m, still_method *out)
{
    still_error err;
    if (start_method(o, m, out, &err)) return cli_fail_error(&err);
    const int status = cli_change_method(o, out);
    if (status != CLI_OK) return status;
    warn_unused(o, out);
    if (!m || !still_model_get_info(m)->method) out->seed = o->seed;
    return CLI_OK;
}

int cli_read_method(const cli_options *o, still_model *m, still_method *out)
{
    const int status = cli_read_uncapped(o, m, out);
    return status == CLI_OK && allocates(o, m) ? give_caps(o, m, out) : status;
}

bool cli_asks_method(const cli_options *o)
{
    return o->method || o->chunk || o->select >= 0 || o->score || o->heads ||
           o->la_scale || o->gate || o->plain_map || o->state || o->layers;
}

char *cli_cap_option(const still_method *m)
{
    char *out = NULL;
    if (asprintf(&out, "%d%s%s", m->cap, m->caps[0] ? "," : "", m->caps) < 0)
        return NULL;
    return out;
}

cli_options cli_with_text(const cli_options *o)
{
    cli_options with = *o;
    struct stat st;
    const char *only = o->n_args == 1 ? o->arg[0] : NULL;
    if (!only || (!strpbrk(only, " \t\n") && strcmp(only, "-") != 0)) return with;
    if (stat(only, &st) == 0) return with; /* a path with a space in it */
    with.arg[0] = NULL;
    with.arg[1] = only;
    with.n_args = 2;
    return with;
}

int cli_run_on_text(const cli_options *o,
                    int (*work)(const cli_options *o, still_model *m, const char *text,
                                size_t n))
{
    still_error err;
    still_model *m = NULL;
    char *text = NULL;
    size_t n;
    const char *file = o->arg[o->n_args - 1];
    if (strcmp(file, "-") ? still_text_read(file, &text, &n, &err)
                          : cli_read(file, MOST_INPUT, &text, &n, &err))
        return cli_fail_error(&err);
    int status = cli_open_model(o, o->n_args == 2 ? o->arg[0] : NULL, &m);
    if (status == CLI_OK) status = work(o, m, text, n);
    still_model_free(m);
    free(text);
    return status;
}

bool cli_is_method(const char *name)
{
    const char *known;
    for (int i = 0; (known = still_method_at(i, NULL)); i++)
        if (strcmp(known, name) == 0) return true;
    return false;
}

int cli_read_lengths(const char *command, const char *text, int *out, int most, int *n)
{
    *n = 0;
    for (const char *at = text; at && *at;) {
        const char *end;
        int64_t v;
        if (!cli_read_number(at, &end, &v) || v < 0 || v > 16777216 ||
            (*end && *end != ',') || *n == most)
            return cli_usage(command, "--lengths: '%s' is not a list such as 512,1K,4K",
                             text);
        out[(*n)++] = (int)v;
        at = end + (*end == ',');
    }
    return CLI_OK;
}

still_session_params cli_session_params(const cli_options *o, const still_method *m,
                                        int64_t ctx)
{
    return STILL_PARAMS(still_session_params, .ctx = (int)ctx, .batch = (int)o->batch,
                        .cache = o->cache, .method = m, .rollback = (int)o->rollback);
}

const char *cli_describe_method(const still_method *m, char *out, size_t room)
{
    int others = m->caps[0] != 0;
    for (const char *at = m->caps; *at; at++) others += *at == ',';
    int n = snprintf(out, room, "%s", m->name);
    if (!strcmp(m->name, "softmax") || n >= (int)room) return out;
    n += snprintf(out + n, room - (size_t)n, ", chunk %d", m->chunk);
    if (n >= (int)room) return out;
    if (m->cap < 0)
        snprintf(out + n, room - (size_t)n, ", no cap on exact tokens");
    else if (m->select > 0)
        snprintf(out + n, room - (size_t)n, ", budget %d exact tokens%s",
                 2 * m->chunk + m->cap,
                 others ? " a head, more in heads that look things up" : " a head");
    return out;
}

int cli_open_session(const cli_options *o, still_model *m, int64_t ctx,
                     still_session **out)
{
    still_error err;
    still_method method;
    int status = cli_read_method(o, m, &method);
    if (status != CLI_OK) return status;
    const still_session_params params = cli_session_params(o, &method, ctx);
    if (still_session_new(m, &params, out, &err)) return cli_fail_error(&err);
    return CLI_OK;
}

int cli_open_sampler(const cli_options *o, still_model *m, still_sampler **out)
{
    still_error err;
    still_sampler_params params = {
        .size = sizeof params,
        .temperature = (float)o->temp,
        .top_k = (int)o->top_k,
        .top_p = (float)o->top_p,
        .min_p = (float)o->min_p,
        .repeat_penalty = (float)o->repeat_penalty,
        .repeat_last = (int)o->repeat_last,
        .seed = o->seed,
    };
    if (still_sampler_new(&params, still_model_get_info(m)->vocab, out, &err))
        return cli_fail_error(&err);
    return CLI_OK;
}

int cli_open_lookup(const cli_options *o, still_lookup **out)
{
    still_error err;
    const char *at = o->lookup;
    int most = 0;
    *out = NULL;
    if (at && strcmp(at, "off") == 0) return CLI_OK;
    if (at && (!read_int(&at, &most) || *at || most < 1 || most > CLI_LOOKUP_MAX))
        return cli_usage(
            NULL,
            "--lookup: '%s' is neither a number of tokens from 1 to %d nor "
            "'off'",
            o->lookup, CLI_LOOKUP_MAX);
    if (still_lookup_new(most, out, &err)) return cli_fail_error(&err);
    return CLI_OK;
}

void cli_usual_sampling(cli_options *o, const still_model_info *info)
{
    const still_sampler_params *theirs = info->sampling;
    const bool say = theirs->temperature >= 0 || theirs->top_p >= 0 ||
                     theirs->top_k >= 0 || theirs->min_p >= 0;
    /* Without a penalty small models repeat themselves for ever; but authors who say how
     * to sample and name none mean none. */
    const struct {
        double *ours, theirs, usual;
    } setting[] = {
        {&o->temp, (double)theirs->temperature, say ? 1 : 0.4},
        {&o->top_p, (double)theirs->top_p, say ? 1 : 0.9},
        {&o->min_p, (double)theirs->min_p, 0},
        {&o->repeat_penalty, (double)theirs->repeat_penalty, say ? 1 : 1.1},
    };
    for (size_t i = 0; i < sizeof setting / sizeof *setting; i++)
        if (*setting[i].ours < 0)
            *setting[i].ours =
                setting[i].theirs >= 0 ? setting[i].theirs : setting[i].usual;
    if (o->top_k < 0) o->top_k = theirs->top_k >= 0 ? theirs->top_k : 0;
    if (o->repeat_last < 0)
        o->repeat_last = theirs->repeat_last > 0 ? theirs->repeat_last : 64;
}

int cli_need_tokenizer(const still_model *m, const still_tokenizer **out)
{
    *out = still_model_tokenizer(m);
    if (*out) return CLI_OK;
    return cli_fail("%s: has no tokenizer; a folder needs tokenizer.json or "
                    "tokenizer.model beside the weights",
                    still_model_get_info(m)->path);
}

int cli_encode(const still_tokenizer *tk, const char *text, size_t n, unsigned flags,
               int32_t **ids, size_t *n_ids)
{
    still_error err;
    *ids = NULL;
    if (still_tokenizer_encode(tk, text, n, flags, NULL, 0, n_ids, &err))
        return cli_fail_error(&err);
    *ids = sti_alloc(*n_ids ? *n_ids : 1, sizeof **ids);
    if (!*ids) return cli_fail("out of memory: %zu tokens", *n_ids);
    if (still_tokenizer_encode(tk, text, n, flags, *ids, *n_ids, n_ids, &err)) {
        free(*ids);
        *ids = NULL;
        return cli_fail_error(&err);
    }
    return CLI_OK;
}

int cli_feed(const cli_options *o, still_session *s, const int32_t *ids, size_t n)
{
    still_error err;
    cli_progress bar;
    cli_progress_begin(&bar, o->quiet, "reading the prompt", "tok", 0, n);
    int status = CLI_OK;
    for (size_t done = 0; done < n && status == CLI_OK;) {
        size_t part = n - done < (size_t)o->batch ? n - done : (size_t)o->batch;
        if (still_session_feed(s, ids + done, (int)part, &err))
            status = cli_fail_error(&err);
        done += part;
        cli_progress_update(&bar, done);
        if (cli_interrupted()) status = CLI_INTERRUPTED;
    }
    cli_progress_end(&bar);
    return status;
}

/* Sends the bytes of one token through the stop filter to standard output. */
static bool emit(const cli_options *o, cli_stream *stream, const char *text, size_t n)
{
    const char *show;
    size_t n_show;
    bool stopped = cli_stream_push(stream, text, n, &show, &n_show);
    if (!o->json && n_show) {
        cli_put(show, n_show);
        cli_flush();
    }
    return stopped;
}

static void finish_stream(const cli_options *o, cli_stream *stream, still_decoder *d)
{
    const char *text;
    size_t n;
    still_decoder_flush(d, &text, &n);
    if (n && emit(o, stream, text, n)) return;
    cli_stream_end(stream, &text, &n);
    if (!o->json) cli_put(text, n);
}

/* Feeds the last token of r, with guesses of what follows it. */
static still_status feed(still_session *s, still_lookup *lookup, cli_reply *r,
                         still_error *err)
{
    const int32_t id = r->token[r->n_fed];
    int32_t guess[CLI_LOOKUP_MAX];
    int n = 0, rows = 0;
    if (lookup) {
        still_lookup_accept(lookup, id);
        n = still_lookup_guess(lookup, guess);
    }
    const double start = cli_now();
    const still_status st = still_session_feed_ahead(s, id, guess, n, &rows, err);
    if (st != STILL_OK) return st;
    if (lookup) still_lookup_timed(lookup, rows, cli_now() - start);
    r->n_fed++;
    r->n_guessed += rows == 0;
    return STILL_OK;
}

/* The loop: sample, show, feed. Ends with r->stop set, or with an error in err. */
static still_status generate(const cli_options *o, still_session *s,
                             const cli_generator *by, still_decoder *decoder,
                             cli_stream *stream, cli_reply *r, still_error *err)
{
    still_matcher *matcher = by->matcher;
    if (matcher) still_matcher_reset(matcher);
    for (;;) {
        int32_t id;
        if (r->n_tokens == (size_t)o->n) {
            r->stop = "length";
            break;
        }
        still_status status = still_sampler_sample_matched(
            by->sampler, matcher, still_session_logits(s), &id, err);
        if (status != STILL_OK) return status;
        if (!o->ignore_eos && still_tokenizer_is_end(by->tk, id)) {
            r->stop = "eos";
            break;
        }
        still_sampler_accept(by->sampler, id);
        if (matcher) status = still_matcher_accept(matcher, id, err);
        if (status != STILL_OK) return status;
        r->token[r->n_tokens++] = id;

        const char *text;
        size_t n;
        status = still_decoder_push(decoder, id, &text, &n, err);
        if (status != STILL_OK) return status;
        if (emit(o, stream, text, n)) {
            r->stop = "stop";
            r->cut = true;
            return STILL_OK;
        }
        if (cli_interrupted() || (!o->json && !cli_flush())) {
            r->stop = "interrupted";
            break;
        }
        if (matcher && still_matcher_done(matcher)) {
            r->stop = "grammar";
            break;
        }
        if (r->n_tokens == (size_t)o->n ||
            still_session_length(s) == still_session_limit(s)) {
            r->stop = "length";
            break;
        }
        status = feed(s, by->lookup, r, err);
        if (status != STILL_OK) return status;
    }
    finish_stream(o, stream, decoder);
    return STILL_OK;
}

int cli_generate(const cli_options *o, still_session *s, const cli_generator *by,
                 cli_reply *reply)
{
    still_error err;
    still_decoder *decoder = NULL;
    cli_stream stream = {.stop = o->stop.item, .n_stops = o->stop.n};
    int64_t left = still_session_limit(s) - still_session_length(s) + 1;
    *reply = (cli_reply){0};
    reply->token = sti_alloc((size_t)(o->n < left ? o->n : left) + 1, sizeof(int32_t));
    if (!reply->token) return cli_fail("out of memory: %lld tokens", (long long)o->n);
    int status = CLI_OK;
    double start = cli_now();
    if (still_decoder_new(by->tk, false, &decoder, &err) ||
        generate(o, s, by, decoder, &stream, reply, &err))
        status = cli_fail_error(&err);
    reply->seconds = cli_now() - start;
    if (status == CLI_OK && stream.text.failed)
        status = cli_fail("out of memory: text of %zu tokens", reply->n_tokens);
    reply->text = stream.text; /* ownership moves */
    still_decoder_free(decoder);
    return status;
}

void cli_reply_free(cli_reply *reply)
{
    sti_buf_free(&reply->text);
    free(reply->token);
    *reply = (cli_reply){0};
}
