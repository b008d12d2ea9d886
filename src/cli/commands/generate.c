/* generate.c - still generate: a prompt, its continuation, and the figures. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "cli/constraint.h"
#include "cli/run.h"

enum { PROMPT_MAX = 64 << 20 };

typedef struct job {
    still_model *model;
    still_session *session;
    still_sampler *sampler;
    cli_constraint rule;
    still_lookup *lookup;
    const still_tokenizer *tk;
    char *prompt;
    size_t n_prompt;
    int32_t *ids;
    size_t n_ids;
    cli_reply reply;
    double load_s, prefill_s;
} job;

static int read_prompt(const cli_options *o, job *j)
{
    still_error err;
    const char *argument = o->n_args > 1 ? o->arg[1] : NULL;
    const char *text = o->prompt ? o->prompt : argument, *file = o->prompt_file;
    if (o->load_state && !strcmp(o->load_state, "-"))
        return cli_usage("generate", "--load-state: standard input (-) cannot be "
                                     "mapped; ./- is a file of that name");
    if (argument && (o->prompt || file))
        return cli_usage("generate",
                         "the prompt is given twice: leave out '%s', or --%s", argument,
                         o->prompt ? "prompt" : "prompt-file");
    if (text && file)
        return cli_usage("generate", "--prompt and --prompt-file exclude each other");
    if (text && !strcmp(text, "-")) file = text;
    if (!text && !file && o->load_state) return CLI_OK;
    if (!text && !file)
        return cli_usage("generate", "'generate' needs a prompt: an argument after the "
                                     "model, -p TEXT or --prompt-file FILE");
    if (file) {
        if (cli_read(file, PROMPT_MAX, &j->prompt, &j->n_prompt, &err))
            return cli_fail_error(&err);
        return CLI_OK;
    }
    j->n_prompt = strlen(text);
    j->prompt = sti_strdup(text);
    return j->prompt ? CLI_OK : cli_fail("out of memory: the prompt");
}

/* Context of the session: --ctx, else just enough for prompt and reply, so that a short
 * run of a long-context model takes little memory; the trained length if a session is
 * saved or loaded, so that the two match. */
static int choose_context(const cli_options *o, const job *j, int64_t *ctx)
{
    int64_t trained = still_model_get_info(j->model)->ctx_train;
    int64_t need = (int64_t)j->n_ids + (o->n > 1 ? o->n - 1 : 0);
    bool kept = o->save_state || o->load_state;
    *ctx = o->ctx ? o->ctx : trained && (kept || need > trained) ? trained : need;
    if ((int64_t)j->n_ids <= *ctx) return CLI_OK;
    if (o->ctx)
        return cli_fail(
            "the prompt has %zu tokens, the context holds %lld: raise --ctx "
            "or shorten the prompt",
            j->n_ids, (long long)*ctx);
    return cli_fail("the prompt has %zu tokens, the model was trained on %lld: shorten "
                    "the prompt, or force it with --ctx %zu",
                    j->n_ids, (long long)*ctx, j->n_ids + (size_t)o->n);
}

/* What is cut off a distribution matters only where it is drawn from. */
static void warn_greedy(const cli_options *o)
{
    char list[64];
    if (o->temp > 0) return;
    snprintf(list, sizeof list, "%s%s%s", o->top_k > 0 ? ", --top-k" : "",
             o->top_p > 0 && o->top_p < 1 ? ", --top-p" : "",
             o->min_p > 0 ? ", --min-p" : "");
    if (*list)
        cli_warn("no effect: %s; without a --temp above 0 the likeliest token is taken",
                 list + 2);
}

static int prefill(const cli_options *o, job *j)
{
    still_error err;
    int64_t ctx;
    int status = cli_need_tokenizer(j->model, &j->tk);
    if (status == CLI_OK)
        status =
            cli_encode(j->tk, j->prompt, j->n_prompt,
                       STILL_ENCODE_BOS | STILL_ENCODE_SPECIAL, &j->ids, &j->n_ids);
    if (status == CLI_OK && j->n_ids == 0 && !o->load_state)
        status = cli_fail("the prompt is empty and this model has no start token to "
                          "begin with: give some text with -p");
    if (status == CLI_OK) status = choose_context(o, j, &ctx);
    if (status == CLI_OK) status = cli_open_session(o, j->model, ctx, &j->session);
    if (status == CLI_OK) status = cli_open_sampler(o, j->model, &j->sampler);
    if (status == CLI_OK) warn_greedy(o);
    if (status == CLI_OK) status = cli_open_lookup(o, &j->lookup);
    if (status == CLI_OK && o->load_state &&
        still_session_load(j->session, o->load_state, &err))
        status = cli_fail_error(&err);
    if (status != CLI_OK) return status;

    double start = cli_now();
    status = cli_feed(o, j->session, j->ids, j->n_ids);
    j->prefill_s = cli_now() - start;
    if (status == CLI_OK && o->save_state &&
        still_session_save(j->session, o->save_state, &err))
        status = cli_fail_error(&err);
    for (size_t i = 0; i < j->n_ids; i++) {
        still_sampler_accept(j->sampler, j->ids[i]);
        if (j->lookup) still_lookup_accept(j->lookup, j->ids[i]);
    }
    return status;
}

static double rate(size_t n, double seconds)
{
    return seconds > 0 ? (double)n / seconds : 0;
}

static int print_object(const cli_options *o, const job *j)
{
    const cli_reply *r = &j->reply;
    sti_buf text = {0};
    if (o->echo) sti_buf_put(&text, j->prompt, j->n_prompt);
    sti_buf_put(&text, r->text.n ? r->text.p : "", r->text.n);
    json_t *tokens = json_array();
    for (size_t i = 0; i < r->n_tokens; i++)
        sti_json_append(&tokens, json_integer(r->token[i]));
    json_t *object = json_pack(
        "{s:o, s:I, s:o, s:s, s:I, s:f, s:f, s:f, s:f, s:f, s:I}", "text",
        cli_json_text(text.p, text.n), "prompt_tokens", (json_int_t)j->n_ids, "tokens",
        tokens, "stop", r->stop, "guessed_tokens", (json_int_t)r->n_guessed,
        "prefill_tokens_per_s", rate(j->n_ids, j->prefill_s), "decode_tokens_per_s",
        rate(r->n_fed, r->seconds), "prefill_s", j->prefill_s, "decode_s", r->seconds,
        "load_s", j->load_s, "peak_rss_bytes", (json_int_t)cli_peak_rss());
    sti_buf_free(&text);
    return cli_print_json(object);
}

/* One line of timings on standard error. */
static void print_figures(const job *j)
{
    char rss[32];
    cli_note(
        "[loaded in %.2f s; prompt %zu tokens, %.0f/s; reply %zu tokens, %zu of them "
        "guessed, %.1f/s; peak memory %s]\n",
        j->load_s, j->n_ids, rate(j->n_ids, j->prefill_s), j->reply.n_tokens,
        j->reply.n_guessed, rate(j->reply.n_fed, j->reply.seconds),
        cli_bytes(rss, cli_peak_rss()));
}

static int run(const cli_options *o, job *j)
{
    int status = cli_constraint_check("generate", o);
    if (status == CLI_OK) status = read_prompt(o, j);
    if (status != CLI_OK) return status;
    double start = cli_now();
    status = cli_open_model(o, o->arg[0], &j->model);
    j->load_s = cli_now() - start;
    if (status == CLI_OK) status = cli_constraint_open(o, j->model, &j->rule);
    if (status == CLI_OK) status = prefill(o, j);
    if (status != CLI_OK) return status;

    if (o->echo && !o->json) cli_put(j->prompt, j->n_prompt);
    const cli_generator by = {j->sampler, j->rule.matcher, j->lookup, j->tk};
    status = cli_generate(o, j->session, &by, &j->reply);
    if (!o->json) cli_put("\n", 1);
    if (status != CLI_OK) return status;
    if (o->json) status = print_object(o, j);
    cli_flush();
    if (!o->quiet && isatty(STDERR_FILENO)) print_figures(j);
    return cli_interrupted() ? CLI_INTERRUPTED : status;
}

int cli_cmd_generate(const cli_options *o)
{
    job j = {0};
    const cli_options with = cli_with_text(o);
    int status = run(&with, &j);
    cli_reply_free(&j.reply);
    still_lookup_free(j.lookup);
    still_sampler_free(j.sampler);
    cli_constraint_close(&j.rule);
    still_session_free(j.session);
    still_model_free(j.model);
    free(j.ids);
    free(j.prompt);
    return status;
}
