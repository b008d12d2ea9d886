/* loop.c - for, and what a template may ask its loop. */
#include "template/eval.h"

struct sti_tloop {
    const sti_tnode *node;
    sti_tscope *scope; /* around the loop, for recursion */
    const sti_tlist *items;
    size_t at;
    int depth;         /* of recursion, 0 outside */
    sti_tlist *before; /* arguments of the last changed(); NULL: none */
};

/* The items that pass the loop's condition, which sees only the loop's variables. */
static const sti_tlist *chosen(sti_run *r, const sti_tnode *n, const sti_tlist *all)
{
    sti_tscope *scope = r->scope;
    if (!n->c || !all) return all;
    const sti_tval out = sti_t_list(r, STI_T_PLAIN, 0);
    for (size_t i = 0; i < all->n && !r->failed; i++) {
        r->scope = sti_scope_new(r, scope);
        sti_assign(r, n->a, all->v[i]);
        if (sti_t_true(r, r->failed ? STI_T_UNDEF : sti_eval(r, n->c)))
            sti_t_append(r, out.u.l, all->v[i]);
    }
    r->scope = scope;
    return r->failed ? NULL : out.u.l;
}

static void run_loop(sti_run *r, sti_tloop *loop, sti_tval over)
{
    const sti_tnode *n = loop->node;
    sti_tscope *scope = r->scope;
    static const sti_tstr name = {.p = "loop", .n = 4};
    sti_flow flow = STI_FLOW_ON;
    bool finished = false; /* an item: as in Jinja2, else is for loops where none was */
    r->scope = loop->scope;
    loop->items = chosen(r, n, sti_t_each(r, over));
    for (; !r->failed && loop->at < loop->items->n && flow != STI_FLOW_BREAK;
         loop->at++) {
        if (!(r->scope = sti_scope_new(r, loop->scope))) break;
        sti_scope_set(r, &name, (sti_tval){.kind = STI_T_LOOP, .u.loop = loop});
        sti_assign(r, n->a, loop->items->v[loop->at]);
        if (!r->failed) flow = sti_exec(r, n->list);
        finished |= flow == STI_FLOW_ON;
    }
    if (!r->failed && !finished && n->other) {
        r->scope = sti_scope_new(r, loop->scope);
        if (r->scope) sti_exec(r, n->other);
    }
    r->scope = scope;
}

static sti_tloop *new_loop(sti_run *r, const sti_tnode *n, sti_tscope *scope, int depth)
{
    sti_tloop *loop = sti_run_take(r, 1, sizeof *loop);
    if (loop) *loop = (sti_tloop){.node = n, .scope = scope, .depth = depth};
    return loop;
}

void sti_exec_for(sti_run *r, const sti_tnode *n)
{
    const sti_tval over = sti_eval(r, n->b);
    r->at = n->b->at;
    sti_tloop *loop = new_loop(r, n, r->scope, 0);
    if (loop) run_loop(r, loop, over);
}

sti_tval sti_loop_recurse(sti_run *r, const sti_tloop *loop, const sti_targs *all)
{
    sti_tout out = {0}, *outer = r->out;
    if (!loop->node->op)
        return sti_run_fail(r, STILL_E_FORMAT, "only a recursive loop can be called");
    if (all->list->n != 1)
        return sti_run_fail(r, STILL_E_FORMAT, "loop() takes what to iterate");
    sti_tloop *inner = new_loop(r, loop->node, loop->scope, loop->depth + 1);
    if (!inner) return STI_T_UNDEF;
    if (sti_run_enter(r)) {
        r->out = &out;
        run_loop(r, inner, all->list->v[0]);
        r->out = outer;
    }
    sti_run_leave(r);
    return sti_tout_take(r, &out);
}

sti_tval sti_loop_attribute(const sti_tloop *loop, const sti_tstr *name)
{
    const int64_t i = (int64_t)loop->at, n = (int64_t)loop->items->n;
    const struct {
        const char *name;
        sti_tval v;
    } known[] = {
        {"index", sti_t_int(i + 1)},       {"index0", sti_t_int(i)},
        {"revindex", sti_t_int(n - i)},    {"revindex0", sti_t_int(n - i - 1)},
        {"first", sti_t_bool(i == 0)},     {"last", sti_t_bool(i + 1 >= n)},
        {"length", sti_t_int(n)},          {"depth", sti_t_int(loop->depth + 1)},
        {"depth0", sti_t_int(loop->depth)}};
    for (size_t k = 0; k < sizeof known / sizeof *known; k++)
        if (sti_t_is(name, known[k].name)) return known[k].v;
    if (sti_t_is(name, "previtem"))
        return i > 0 && i <= n ? loop->items->v[i - 1] : STI_T_UNDEF;
    if (sti_t_is(name, "nextitem"))
        return i + 1 < n ? loop->items->v[i + 1] : STI_T_UNDEF;
    return STI_T_UNDEF;
}

sti_tval sti_loop_cycle(sti_run *r, sti_tloop *loop, const sti_targs *all)
{
    if (!all->list->n)
        return sti_run_fail(r, STILL_E_FORMAT,
                            "cycle() needs something to cycle through");
    return all->list->v[loop->at % all->list->n];
}

sti_tval sti_loop_changed(sti_run *r, sti_tloop *loop, const sti_targs *all)
{
    const sti_tval now = {.kind = STI_T_LIST, .u.l = all->list},
                   before = {.kind = STI_T_LIST, .u.l = loop->before};
    const bool changed = !loop->before || !sti_t_equal(r, now, before);
    loop->before = all->list;
    return sti_t_bool(changed);
}
