/* render.c - a run from beginning to end: variables, limits, the result. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "template/eval.h"

/* A run may take this much, and more for longer conversations. Steps take 10 to 50 ns. */
enum { STEPS = 2000000, STEPS_PER_BYTE = 64 };
enum { MEMORY = 64 << 20, OUTPUT = 8 << 20, TIMES_INPUT = 64 };

/* Bytes that a JSON value's strings and names have, and a few for each value. */
static size_t size_of(const json_t *v)
{
    const char *name;
    json_t *member;
    size_t n = 8 + json_string_length(v);
    if (json_is_object(v))
        json_object_foreach((json_t *)v, name, member) n +=
            strlen(name) + size_of(member);
    for (size_t i = 0; i < json_array_size(v); i++) n += size_of(json_array_get(v, i));
    return n;
}

static void set(sti_run *r, const char *name, sti_tval v)
{
    const sti_tval key = sti_t_puts(r, name);
    if (!r->failed) sti_scope_set(r, key.u.s, v);
}

static void set_globals(sti_run *r, const sti_template_input *in)
{
    const char *name;
    json_t *v, *variables = (json_t *)in->variables;
    const sti_ttable functions = sti_functions();
    for (size_t i = 0; i < functions.n; i++)
        set(r, functions.row[i].name,
            (sti_tval){.kind = STI_T_FUNCTION, .u.function = i});
    json_object_foreach(variables, name, v)
    {
        set(r, name,
            strcmp(name, "messages") ? sti_t_from_json(r, v) : sti_t_messages(r, v));
    }
    if (in->bos) set(r, "bos_token", sti_t_puts(r, in->bos));
    if (in->eos) set(r, "eos_token", sti_t_puts(r, in->eos));
}

static still_status take(const sti_tout *o, still_rendering *out, still_error *err)
{
    out->text = sti_strndup(o->n ? o->p : "", o->n);
    out->content = sti_alloc(o->n + 1, 1);
    if (!out->text || !out->content) return sti_fail_memory(err, "conversation", o->n);
    if (o->n) {
        memcpy(out->text, o->p, o->n); /* with bytes 0, if there are */
        memcpy(out->content, o->mark, o->n);
    }
    out->n = o->n;
    return STILL_OK;
}

still_status sti_template_render(const sti_template *t, const sti_template_input *in,
                                 still_rendering *out, still_error *err)
{
    const size_t input = size_of(in->variables);
    sti_tout text = {0};
    sti_run r = {.t = t,
                 .err = err,
                 .now = in->now,
                 .out = &text,
                 .most_steps = STEPS + (uint64_t)input * STEPS_PER_BYTE,
                 .most_output = OUTPUT + input * TIMES_INPUT};
    r.mem.limit = MEMORY + input * TIMES_INPUT;
    *out = (still_rendering){0};
    r.scope = sti_scope_new(&r, NULL);
    if (r.scope) set_globals(&r, in);
    if (!r.failed && (r.scope = sti_scope_new(&r, r.scope))) sti_exec(&r, t->body);
    still_status st = r.failed ? r.status : take(&text, out, err);
    sti_arena_free(&r.mem);
    if (r.letters) freelocale(r.letters);
    if (st != STILL_OK) still_rendering_free(out);
    return st;
}

void still_rendering_free(still_rendering *r)
{
    if (!r) return;
    free(r->text);
    free(r->content);
    *r = (still_rendering){0};
}
