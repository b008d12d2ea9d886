/* allocate.c - still allocate: which heads look things up, and how many salient tokens
 * each of them keeps within a number of bytes. */
#include <stdio.h>
#include <stdlib.h>

#include "base/new_file.h"
#include "cli/fetch/cache.h"
#include "cli/outputs.h"
#include "cli/progress.h"
#include "cli/report/heads.h"
#include "cli/run.h"

static int print_json(const still_allocation *a, double seconds)
{
    const int n = a->layers * a->heads;
    json_t *gain = json_array(), *cap = json_array();
    for (int i = 0; i < n; i++) {
        sti_json_append(&gain, json_real(a->gain[i]));
        sti_json_append(&cap, json_integer(a->cap[i]));
    }
    json_t *all = json_pack(
        "{s:i, s:i, s:i, s:I, s:s, s:s, s:i, s:i, s:f, s:o, s:o}", "layers", a->layers,
        "heads", a->heads, "chosen", a->chosen, "bytes", (json_int_t)a->bytes, "method",
        a->method.name, "score", a->method.score, "select", a->method.select, "chunk",
        a->method.chunk, "seconds", seconds, "gain", gain, "caps", cap);
    char *option = cli_cap_option(&a->method);
    sti_json_set(&all, "cap", option ? json_string(option) : NULL);
    free(option);
    return cli_print_json(all);
}

/* Heads that keep more than the others by falling gain, then what to do with it. */
static int print_table(const still_allocation *a)
{
    const int n = a->layers * a->heads, few = a->method.cap;
    const still_method *m = &a->method;
    char *option = cli_cap_option(m);
    if (!option) return cli_fail("out of memory");
    int capped = 0;
    for (int i = 0; i < n; i++) capped += a->cap[i] > 0;
    cli_print("%d of %d kv heads keep more than the usual %d salient tokens; a session "
              "takes %.2f MB\n\n",
              a->chosen, capped, few, (double)a->bytes / 1e6);
    cli_print("| layer | kv head | attention on the fact | salient tokens |\n"
              "|-:|-:|-:|-:|\n");
    double below = 2;
    for (int shown = 0; shown < a->chosen;) {
        double next = -1;
        for (int i = 0; i < n; i++)
            if (a->cap[i] > few && a->gain[i] < below && a->gain[i] > next)
                next = a->gain[i];
        if (next < 0) break;
        for (int i = 0; i < n; i++)
            if (a->cap[i] > few && a->gain[i] == next) {
                cli_print("| %d | %d | %.3f | %d |\n", i / a->heads, i % a->heads, next,
                          a->cap[i]);
                shown++;
            }
        below = next;
    }
    cli_print("\n--method %s --chunk %d --select %d --score %s%s%s%s%s%s --cap %s",
              m->name, m->chunk, m->select, m->score, m->gate ? "" : " --gate none",
              m->positions == STILL_POSITIONS_CAPPED ? " --positions capped" : "",
              m->forget ? " --state none" : "", m->norm_preserved ? "" : " --plain-map",
              m->window_scale ? " --la-scale window" : "", option);
    if (m->first_layer > 0 || m->last_layer >= 0)
        cli_print(" --layers %d-%d", m->first_layer,
                  m->last_layer < 0 ? a->layers - 1 : m->last_layer);
    if (m->key_bits) cli_print(" --cache-type-k q%d", m->key_bits);
    if (m->value_bits) cli_print(" --cache-type-v q%d", m->value_bits);
    cli_print("\n");
    free(option);
    return CLI_OK;
}

static int write_picture(const still_allocation *a, const char *path)
{
    sti_buf svg = {0};
    cli_heads_draw(a, &svg);
    const int status = cli_write(path, &svg);
    sti_buf_free(&svg);
    return status;
}

/* Where the results of probes are kept; NULL: no such place, which is said. */
static char *kept_folder(void)
{
    still_error err;
    char *folder = NULL;
    if (cli_cache_place("heads", "", &folder, &err) == STILL_OK &&
        cli_make_folders(folder, &err) == STILL_OK)
        return folder;
    cli_warn("probes will run again the next time: %s", err.text);
    free(folder);
    return NULL;
}

static void on_note(void *user, const char *line)
{
    cli_progress_end(user);
    cli_warn("%s", line);
}

int cli_allocate(const cli_options *o, still_model *m, const still_method *method,
                 still_allocation **out)
{
    still_error err;
    cli_progress bar;
    still_allocate_params p = {.size = sizeof p,
                               .method = method,
                               .key_bits = cli_cache_bits(o->cache_type_k),
                               .value_bits = cli_cache_bits(o->cache_type_v),
                               .seed = o->seed,
                               .budget = cli_budget(o),
                               .probes = (int)o->probes,
                               .shrink = o->budget && !o->chunk,
                               .progress = cli_progress_tick,
                               .note = on_note,
                               .user = &bar};
    *out = NULL;
    char *folder = kept_folder();
    p.folder = folder;
    cli_progress_begin(&bar, o->quiet, "which heads look things up", "probes", 0, 0);
    const still_status st = still_allocate(m, &p, out, &err);
    cli_progress_end(&bar);
    free(folder);
    return st == STILL_OK ? CLI_OK : cli_fail_error(&err);
}

int cli_cmd_allocate(const cli_options *o)
{
    still_model *m;
    still_method method;
    still_allocation *a = NULL;
    const double start = cli_now();
    int status = cli_open_model(o, o->n_args ? o->arg[0] : NULL, &m);
    const bool asked = cli_asks_method(o);
    cli_options with = *o;
    if (status == CLI_OK && !o->method && !still_model_get_info(m)->method)
        with.method = "still";
    if (status == CLI_OK && asked) status = cli_read_uncapped(&with, m, &method);
    if (status == CLI_OK) status = cli_allocate(o, m, asked ? &method : NULL, &a);
    if (status == CLI_OK && o->svg) status = write_picture(a, o->svg);
    if (status == CLI_OK && !o->to_stdout)
        status = o->json ? print_json(a, cli_now() - start) : print_table(a);
    still_allocation_free(a);
    still_model_free(m);
    return status;
}
