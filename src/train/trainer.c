/* trainer.c - sets up a run before its first step: settings with their defaults and
 * checks, the initial adapter, and memory. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/random.h"
#include "train/train.h"

/* ---- Settings ------------------------------------------------------------ */

static void set_defaults(still_train_params *p)
{
#define DEFAULT(field, value)                                                          \
    if (p->field == 0) p->field = (value)
    DEFAULT(tokens, 20000000);
    DEFAULT(seq, 1024);
    DEFAULT(batch, 8);
    DEFAULT(micro_batch, 1);
    DEFAULT(held_out, 0.02);
    DEFAULT(lr[1], 1e-2);
    DEFAULT(lr[2], 5e-4);
    DEFAULT(warmup, 0.05);
    DEFAULT(clip, 1);
    DEFAULT(beta1, 0.9);
    DEFAULT(beta2, 0.95);
    DEFAULT(lora_rank, 8);
    DEFAULT(lora_alpha, 16);
    DEFAULT(cap_share, 1);
    DEFAULT(lora_targets, (1u << STI_TARGETS) - 1);
    for (int g = 0; g < STILL_GROUPS; g++) DEFAULT(lr_scale[g], 1);
    DEFAULT(cache_dir, p->out);
#undef DEFAULT
    if (p->held_out < 0) p->held_out = 0;
}

/* Every condition is false for NaN. */
static still_status check_numbers(const still_train_params *p, still_error *err)
{
    static const char share[] = "0 to 1", part[] = "0 or more and below 1",
                      positive[] = "0 or more and finite";
#define BELOW(x, most) ((x) >= 0 && (x) < (most))
    const struct {
        const char *name;
        double x;
        bool ok;
        const char *expected;
    } number[] = {
        {"learning rate of stage 1", p->lr[1], BELOW(p->lr[1], INFINITY), positive},
        {"learning rate of stage 2", p->lr[2], BELOW(p->lr[2], INFINITY), positive},
        {"warm-up", p->warmup, p->warmup >= 0 && p->warmup <= 1, share},
        {"held-out share", p->held_out, BELOW(p->held_out, 1), part},
        {"clipping", p->clip, p->clip >= 0, "0 or more"}, /* infinity: none */
        {"beta1", p->beta1, BELOW(p->beta1, 1), part},
        {"beta2", p->beta2, BELOW(p->beta2, 1), part},
        {"weight decay", p->decay, BELOW(p->decay, INFINITY), positive},
        {"LoRA alpha", p->lora_alpha, BELOW(p->lora_alpha, 1e30), positive},
        {"dropout", p->lora_dropout, BELOW(p->lora_dropout, 1), part},
        {"kd", p->kd, BELOW(p->kd, INFINITY), positive},
        {"share of caps", p->cap_share, p->cap_share >= 0 && p->cap_share <= 1, share},
    };
#undef BELOW
    for (size_t i = 0; i < sizeof number / sizeof *number; i++)
        if (!number[i].ok)
            return sti_fail(err, STILL_E_ARG, "%s is %g, it must be %s", number[i].name,
                            number[i].x, number[i].expected);
    for (int g = 0; g < STILL_GROUPS; g++)
        if (!isfinite(p->lr_scale[g]))
            return sti_fail(err, STILL_E_ARG, "learning rate's scale %g is not finite",
                            p->lr_scale[g]);
    return STILL_OK;
}

static still_status check(const still_model *m, const still_train_params *p,
                          still_error *err)
{
    if (m->adapter)
        return sti_fail(err, STILL_E_ARG,
                        "%s: is already linearized: train its base model, and give "
                        "the adapter as what to start from",
                        m->store.path);
    if (m->tokenizer && still_tokenizer_vocab_size(m->tokenizer) > m->cfg.vocab)
        return sti_fail(err, STILL_E_ARG,
                        "%s: the tokenizer has %d tokens, the model's vocabulary %d: "
                        "they do not belong together",
                        m->store.path, still_tokenizer_vocab_size(m->tokenizer),
                        m->cfg.vocab);
    if (!m->be->hybrid_backward)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "backend %s runs models but does not train them: use --backend "
                        "cpu",
                        m->be->name);
    if (strcmp(p->method.name, "softmax") == 0)
        return sti_fail(err, STILL_E_ARG,
                        "method softmax is the teacher itself: choose what it is to be "
                        "turned into");
    if (p->stage < 0 || p->stage > 2)
        return sti_fail(err, STILL_E_ARG, "stage %d is not 1, 2 or 0 for both",
                        p->stage);
    if (p->seq < 2 || p->seq > 1 << 20 || p->batch < 1 || p->batch > 1 << 16 ||
        p->micro_batch < 1 || p->micro_batch > p->batch)
        return sti_fail(err, STILL_E_ARG,
                        "%d sequences of %d tokens, %d at once, cannot be a batch",
                        p->batch, p->seq, p->micro_batch);
    STI_TRY(check_numbers(p, err));
    for (int l = 0; l < m->cfg.layers && p->stage != 1; l++)
        if (m->cfg.window[l] == 1)
            return sti_fail(err, STILL_E_UNSUPPORTED,
                            "layer %d has a sliding window of 1: stage 2 cannot go "
                            "back through it",
                            l);
    return STILL_OK;
}

static void plan_steps(sti_trainer *t)
{
    const uint64_t step = (uint64_t)t->p.batch * (uint64_t)t->p.seq;
    const uint64_t steps = (t->p.tokens - 1) / step + 1; /* tokens > 0 */
    if (t->p.stage != 2) t->stage_steps[1] = steps;
    if (t->p.stage != 1) t->stage_steps[2] = steps;
    t->stage = t->p.stage == 2 ? 2 : 1;
    t->steps = steps;
}

/* ---- The adapter --------------------------------------------------------- */

/* A of every LoRA pair is uniform within 1 / sqrt(inputs); B starts at 0, so LoRA
 * starts without effect. */
static void start_low_rank(sti_trainer *t)
{
    const sti_adapter *a = t->adapter;
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *e = &a->entry[i];
        if (e->kind != STI_TRAINED_LORA_A) continue;
        const uint64_t key = sti_mix64(t->p.seed ^ sti_mix64(i));
        const double bound = 1 / sqrt((double)e->dim[1]);
        for (size_t k = 0; k < e->n; k++)
            a->value[e->at + k] =
                (float)(bound * ((double)(sti_mix64(key + k) >> 11) * 0x1p-52 - 1));
    }
}

static still_status start_from(sti_trainer *t, const char *dir, still_error *err)
{
    sti_adapter_spec spec;
    STI_TRY(sti_adapter_read_spec(dir, &spec, err));
    if (memcmp(spec.base, t->adapter->spec.base, STI_FINGERPRINT) != 0)
        return sti_fail(err, STILL_E_ARG,
                        "%s: the adapter was trained for another base model ('%s')",
                        dir, spec.base_name);
    sti_store s = {0};
    size_t found = 0;
    still_status st = sti_adapter_open(dir, &s, err);
    if (st == STILL_OK) st = sti_adapter_fill(t->adapter, &s, "", &found, err);
    if (st == STILL_OK && found == 0)
        st = sti_fail(err, STILL_E_ARG,
                      "%s: holds nothing that method %s could start from", dir,
                      t->p.method.name);
    sti_store_close(&s);
    return st;
}

static bool has_work(const sti_trainer *t, int stage)
{
    for (size_t i = 0; i < t->adapter->n_entries; i++)
        if (sti_trains(t, stage, &t->adapter->entry[i])) return true;
    return false;
}

/* With both stages, skips the first if the method has nothing to learn in it. */
static still_status check_stages(sti_trainer *t, still_error *err)
{
    const char *method = t->p.method.name;
    if (t->p.match_weights && t->p.stage != 2 &&
        t->cfg.method->engine == &sti_attn_linear)
        return sti_fail(err, STILL_E_ARG,
                        "method %s has no attention weights that stage 1 could match: "
                        "match its outputs",
                        method);
    const sti_backend *be = t->m->be;
    if ((t->p.match_weights && !be->hybrid_match) ||
        (t->cfg.method->engine == &sti_attn_linear && !be->linear_backward))
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "backend %s cannot train %s%s: use --backend cpu", be->name,
                        method, t->p.match_weights ? " by its attention weights" : "");
    if (t->p.stage == 0 && !has_work(t, 1)) {
        t->stage_steps[1] = 0;
        t->stage = 2;
    }
    for (int s = 1; s <= 2; s++)
        if (t->stage_steps[s] && !has_work(t, s))
            return sti_fail(err, STILL_E_ARG,
                            "method %s has nothing to train in stage %d%s", method, s,
                            s == 1 ? ": run stage 2"
                                   : ": all that it could train is frozen");
    return STILL_OK;
}

/* A cap of a head's own while it trains: a share of it, no less than that of others. */
static int scarce(const still_train_params *p, int cap)
{
    const int share = (int)(p->cap_share * cap), least = p->method.cap;
    if (cap <= least || least < 0) return cap;
    return share > least ? share : least;
}

static still_status make_adapter(sti_trainer *t, still_error *err)
{
    const still_train_params *p = &t->p;
    sti_adapter_spec spec = {.method = p->method};
    if (t->stage_steps[2])
        spec.lora = (sti_lora_spec){.rank = p->lora_rank,
                                    .alpha = (float)p->lora_alpha,
                                    .targets = p->lora_targets};
    const char *name = p->base_name ? p->base_name : t->m->store.path;
    if (snprintf(spec.base_name, sizeof spec.base_name, "%s", name) >=
        (int)sizeof spec.base_name)
        return sti_fail(err, STILL_E_ARG, "%s: the name is too long", name);
    sti_model_fingerprint(t->m, false, spec.base);
    /* Training sees sequences from their beginning, so positions need no cap. */
    spec.method.positions = STILL_POSITIONS_AUTO;
    still_method absolute = spec.method;
    absolute.positions = STILL_POSITIONS_ABSOLUTE;
    const sti_attn_layer layer = sti_model_attn_layer(t->m, 0);
    t->cfg = (sti_attn_config){.cache = STI_F32, .ctx = p->seq, .batch = p->seq};
    STI_TRY(
        sti_attn_configure(&absolute, &layer, t->m->cfg.layers, p->seq, &t->cfg, err));
    for (int i = 0; i < t->cfg.n_caps; i++)
        t->cfg.caps[i].cap = scarce(p, t->cfg.caps[i].cap);
    const sti_adapter_home home = sti_model_home(t->m);
    STI_TRY(sti_adapter_new(&home, &spec, &t->adapter, err));
    start_low_rank(t);
    STI_TRY(check_stages(t, err));
    if (p->start) STI_TRY(start_from(t, p->start, err));
    return sti_adapter_push(t->adapter, err);
}

/* ---- Memory -------------------------------------------------------------- */

/* Numbers in t->sums. */
static size_t sums_of(const sti_trainer *t)
{
    const size_t M = (size_t)t->micro_batch * (size_t)t->p.seq,
                 layers = (size_t)t->m->cfg.layers;
    return 2 * (M > layers ? M : layers);
}

/* layers: how many have acts of their own. */
static void carve_trainer(sti_trainer *t, int layers, sti_carve *c)
{
    const still_model *m = t->m;
    const size_t T = (size_t)t->p.seq, B = (size_t)t->micro_batch, M = B * T,
                 hidden = (size_t)m->cfg.hidden, vocab = (size_t)m->cfg.vocab,
                 qd = (size_t)m->cfg.heads * (size_t)m->cfg.head_dim;
    const size_t rows = (size_t)t->loss_rows;
    const int rank = t->adapter->spec.lora.rank;
    const bool raw = t->cfg.method->engine == &sti_attn_linear;
    sti_acts_carve(m, t->micro_batch, t->p.seq, rank, raw, layers, c, &t->acts);
    sti_grads_carve(m, t->micro_batch, t->p.seq, rank, c, &t->back);
    t->x = sti_carve_take(c, M * hidden, sizeof(float));
    t->student = sti_carve_take(c, M * qd, sizeof(float));
    t->sums = sti_carve_take(c, sums_of(t), sizeof *t->sums);
    if (!t->stage_steps[2]) return;
    t->inputs = sti_carve_take(c, (size_t)m->cfg.layers * M * hidden, sizeof(float));
    t->dx = sti_carve_take(c, M * hidden, sizeof(float));
    t->normed = sti_carve_take(c, M * hidden, sizeof(float));
    t->logits = sti_carve_take(c, rows * vocab, sizeof(float));
    if (t->p.kd <= 0) return;
    t->teacher = sti_carve_take(c, M * hidden, sizeof(float));
    t->teacher_logits = sti_carve_take(c, rows * vocab, sizeof(float));
}

static void carve_tables(sti_trainer *t, sti_carve *c)
{
    const size_t B = (size_t)t->micro_batch, M = B * (size_t)t->p.seq,
                 entries = t->adapter->n_entries;
    sti_batch_carve(&t->batch, c);
    t->ids = sti_carve_take(c, M, sizeof *t->ids);
    t->target = sti_carve_take(c, M, sizeof *t->target);
    t->counts = sti_carve_take(c, M, sizeof *t->counts);
    t->row_weight = sti_carve_take(c, M, sizeof *t->row_weight);
    t->results = sti_carve_take(c, sums_of(t), sizeof *t->results);
    t->span = sti_carve_take(c, entries, sizeof *t->span);
    t->square = sti_carve_take(c, entries, sizeof *t->square);
    t->adam = sti_carve_take(c, entries, sizeof *t->adam);
    if (!t->m->be->host_memory && sti_comm_size(t->comm) > 1 && !t->devices_met)
        t->gathered = sti_carve_take(c, t->adapter->n_values, sizeof(float));
}

/* How many layers keep their activations for the backward: all, or 1 that all share,
 * which computes each layer twice. A GPU usually has the memory; a CPU, which
 * computes in its caches, gains little. Keeping all requires that as much memory
 * again as without stays free, because operators need scratch. */
static int layers_kept(sti_trainer *t)
{
    const sti_backend *be = t->m->be;
    const int L = t->m->cfg.layers;
    sti_carve with = {0}, without = {0};
    sti_block probe;
    size_t bytes;
    still_error why;
    if (be->host_memory || !t->stage_steps[2] || L < 2) return 1;
    carve_trainer(t, L, &with);
    carve_trainer(t, 1, &without);
    if (!sti_add(with.used, without.used, &bytes) ||
        be->mem_new(t->m->dev, bytes, &probe, &why) != STILL_OK)
        return 1;
    be->mem_free(t->m->dev, &probe);
    (void)be->mem_peak(t->m->dev, true); /* it was never in use */
    return L;
}

/* Allocates everything or nothing. */
static still_status allocate(sti_trainer *t, still_error *err)
{
    const sti_backend *be = t->m->be;
    const size_t n = t->adapter->n_values;
    const int layers = layers_kept(t);
    sti_carve work = {0}, tables = {0};
    carve_trainer(t, layers, &work);
    carve_tables(t, &tables);
    still_error why;
    if (be->mem_new(t->m->dev, 3 * n * sizeof(float), &t->moments, &why) != STILL_OK ||
        be->mem_new(t->m->dev, work.used, &t->work, &why) != STILL_OK ||
        !sti_block_new(&t->tables, tables.used))
        return sti_fail(
            err, STILL_E_MEMORY,
            "training %d x %d tokens at once needs %.1f GB of memory, which "
            "is not there: use shorter sequences",
            t->micro_batch, t->p.seq, (double)(work.used + tables.used + 12 * n) / 1e9);
    work = (sti_carve){.base = t->work.p};
    tables = (sti_carve){.base = t->tables.p};
    carve_trainer(t, layers, &work);
    carve_tables(t, &tables);
    return STILL_OK;
}

static still_status reserve_memory(sti_trainer *t, still_error *err)
{
    const size_t n = t->adapter->n_values;
    t->micro_batch = t->p.micro_batch;
    t->loss_rows = t->m->be->host_memory ? STI_LOSS_ROWS : STI_LOSS_ROWS_FAR;
    t->batch = (sti_batch){.B = t->micro_batch, .T = t->p.seq};
    STI_TRY(allocate(t, err));
    t->grad = t->moments.p;
    t->moment1 = t->grad + n;
    t->moment2 = t->moment1 + n;
    return t->m->be->dev_reserve(t->m->dev, t->micro_batch * t->p.seq, err);
}

void sti_trainer_end(sti_trainer *t, still_status st)
{
    /* A failure that all ranks know of ends them all; any other leaves them waiting. */
    if (st != STILL_OK && st != STILL_E_CANCELLED && sti_comm_failed_rank(t->comm) < 0)
        sti_comm_fail(t->comm);
    t->m->be->mem_free(t->m->dev, &t->moments);
    t->m->be->mem_free(t->m->dev, &t->work);
    sti_block_free(&t->tables);
    sti_adapter_free(t->adapter);
    sti_data_free(t->data);
    sti_comm_free(t->comm);
}

/* ---- Together ------------------------------------------------------------ */

/* Whether every rank has a device of its own. */
static still_status alone_with_device(sti_trainer *t, bool *out, still_error *err)
{
    const int size = sti_comm_size(t->comm), rank = sti_comm_rank(t->comm);
    uint8_t mine[STI_DEVICE_NAME];
    bool shared = false;
    STI_TRY(sti_comm_settle(t->comm, t->m->be->ranks_name(t->m->dev, mine, err), err));
    for (int r = 0; r < size; r++) {
        uint8_t theirs[STI_DEVICE_NAME];
        memcpy(theirs, mine, sizeof theirs);
        STI_TRY(sti_comm_tell(t->comm, r, theirs, sizeof theirs, err));
        shared = shared || (r != rank && memcmp(theirs, mine, sizeof mine) == 0);
    }
    STI_TRY(sti_comm_any(t->comm, &shared, err));
    *out = !shared;
    return STILL_OK;
}

/* Lets the ranks' devices add gradients among themselves, if they can. */
static still_status meet(sti_trainer *t, still_error *err)
{
    const sti_backend *be = t->m->be;
    uint8_t place[STI_RANKS_ID] = {0};
    bool able = be->ranks_sum && sti_comm_size(t->comm) > 1;
    if (able) STI_TRY(alone_with_device(t, &able, err));
    if (!able) return STILL_OK;
    const int rank = sti_comm_rank(t->comm);
    still_status st = rank == 0 ? be->ranks_new_id(place, err) : STILL_OK;
    STI_TRY(sti_comm_agree(t->comm, 0, st, err));
    STI_TRY(sti_comm_tell(t->comm, 0, place, sizeof place, err));
    st = be->ranks_join(t->m->dev, place, rank, sti_comm_size(t->comm), err);
    STI_TRY(sti_comm_settle(t->comm, st, err));
    t->devices_met = true;
    return STILL_OK;
}

static still_status begin(sti_trainer *t, still_error *err)
{
    STI_TRY(check(t->m, &t->p, err));
    plan_steps(t);
    if (t->p.batch % sti_comm_size(t->comm) != 0)
        return sti_fail(
            err, STILL_E_ARG,
            "a batch of %d sequences cannot be dealt out evenly to %d ranks",
            t->p.batch, sti_comm_size(t->comm));
    STI_TRY(make_adapter(t, err));
    return reserve_memory(t, err);
}

still_status sti_trainer_begin(sti_trainer *t, still_error *err)
{
    set_defaults(&t->p);
    STI_TRY(sti_comm_new(&t->comm, err));
    STI_TRY(meet(t, err));
    return sti_comm_settle(t->comm, begin(t, err), err);
}
