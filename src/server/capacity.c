/* capacity.c - see capacity.h. */
#include "server/capacity.h"

#include "base/error.h"
#include "base/process.h"

enum {
    ON_THE_WAY = 3,           /* pasts that are being written, or were just read */
    USUAL_PARALLEL = 16,      /* on a cpu more sequences only share its cores */
    USUAL_PARALLEL_GPU = 128, /* a GPU reads its weights once for all of them */
    REQUEST = 1 << 20         /* what a request takes besides: its text, its answer */
};
static const size_t USUAL_CACHE = (size_t)2 << 30;

static still_status fill_in(const srv_scheduler_params *p, srv_capacity *c, bool *gpu,
                            still_error *err)
{
    still_bill bill, one, all;
    still_method softmax;
    still_session_params sp = p->session;
    const size_t vocab = (size_t)still_model_get_info(p->model)->vocab;
    STI_TRY(still_model_bill(p->model, &sp, &bill, err));
    sp.rollback = 0;
    STI_TRY(still_model_bill(p->model, &sp, &one, err));
    STI_TRY(still_method_init(&softmax, "softmax", 0, err));
    sp.method = &softmax;
    c->softmax =
        still_model_bill(p->model, &sp, &all, NULL) == STILL_OK ? all.cache : 0;
    c->conversation = one.cache;
    /* Its logits and ids, a sampler's candidates and counts, the request. */
    c->session = one.cache + vocab * 16 + REQUEST;
    c->fixed = bill.total - one.cache;
    if (p->cache_dir) c->fixed += ON_THE_WAY * one.cache;
    *gpu = bill.device > 0;
    return STILL_OK;
}

still_status srv_capacity_plan(srv_scheduler_params *p, size_t memory,
                               srv_capacity *out, still_error *err)
{
    srv_capacity c = {0};
    bool gpu;
    STI_TRY(fill_in(p, &c, &gpu, err));
    if (memory == 0) memory = sti_rss() + sti_memory_free() / 2;
    const bool cache_given = p->cache_bytes != SIZE_MAX;
    const size_t wanted = cache_given ? p->cache_bytes : 0;
    const size_t least = c.fixed + wanted;
    const size_t fit = memory > least ? (memory - least) / c.session : 0;
    const int most = gpu ? USUAL_PARALLEL_GPU : USUAL_PARALLEL;
    c.parallel = p->parallel ? p->parallel : fit < (size_t)most ? (int)fit : most;
    if (c.parallel < 1 || (size_t)c.parallel > fit)
        return sti_fail(
            err, STILL_E_MEMORY,
            "%d conversations at once do not fit %.2f GB: the model takes "
            "%.2f GB, what is kept of others %.2f GB, each of them %.1f MB, "
            "so %zu fit; give more with --memory, or use a smaller --ctx",
            c.parallel < 1 ? 1 : c.parallel, (double)memory / 1e9,
            (double)c.fixed / 1e9, (double)wanted / 1e9, (double)c.session / 1e6, fit);
    const size_t sessions = (size_t)c.parallel * c.session;
    const size_t rest = memory - c.fixed - sessions;
    c.cache = cache_given ? p->cache_bytes : rest < USUAL_CACHE ? rest : USUAL_CACHE;
    c.kept = (int)(c.cache / c.conversation);
    c.total = c.fixed + sessions + c.cache;
    p->parallel = c.parallel;
    p->cache_bytes = c.cache;
    *out = c;
    return STILL_OK;
}
