/* linearize.c - a training run: checks before it starts, its two stages,
 * interrupting and resuming. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/process.h"
#include "base/sized.h"
#include "train/train.h"

enum { SAVE_SECONDS = 120 };

/* ---- Preparing ----------------------------------------------------------- */

static still_status open_data(sti_trainer *t, still_error *err)
{
    sti_data_source *source = sti_alloc((size_t)t->p.n_data, sizeof *source);
    if (!source) return sti_fail_memory(err, "data", 0);
    for (int i = 0; i < t->p.n_data; i++)
        source[i] = (sti_data_source){t->p.data[i].path, t->p.data[i].weight};
    const sti_data_params d = {.source = source,
                               .n_sources = t->p.n_data,
                               .seq = t->p.seq,
                               .mask_prompt = t->p.mask_prompt,
                               .held_out = t->p.held_out,
                               .seed = t->p.seed,
                               .cache_dir = t->p.cache_dir,
                               .progress = t->p.reading,
                               .user = t->p.user};
    still_status st = STILL_OK;
    /* Rank 0 tokenizes; the others find the cache. */
    if (sti_comm_rank(t->comm) == 0)
        st = sti_data_open(t->m->tokenizer, &d, &t->data, err);
    st = sti_comm_agree(t->comm, 0, st, err);
    if (st != STILL_OK) {
        free(source);
        return st;
    }
    if (sti_comm_rank(t->comm) > 0)
        st = sti_data_open(t->m->tokenizer, &d, &t->data, err);
    free(source);
    return sti_comm_settle(t->comm, st, err);
}

static bool exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0;
}

static still_status make_folder(const sti_trainer *t, still_error *err)
{
    const char *out = t->p.out;
    if (!out || !*out) return sti_fail(err, STILL_E_ARG, "no output folder is given");
    if (t->p.resume && !sti_checkpoint_there(out))
        return sti_fail(err, STILL_E_ARG, "%s: holds no checkpoint to go on from%s",
                        out, sti_adapter_is(out) ? ": the run is finished" : "");
    if (t->p.resume) return STILL_OK;
    if (exists(out))
        return sti_fail(err, STILL_E_ARG, "%s: exists already; %s", out,
                        sti_checkpoint_there(out)
                            ? "go on with its run by --resume, or choose another folder"
                            : "choose another folder");
    if (mkdir(out, 0777) != 0)
        return sti_fail(err, STILL_E_IO, "%s: cannot be made: %s", out,
                        strerror(errno));
    return STILL_OK;
}

static still_status check_data(const sti_trainer *t, still_error *err)
{
    if (!t->m->tokenizer)
        return sti_fail(err, STILL_E_ARG,
                        "%s: has no tokenizer, so text cannot become training data",
                        t->m->store.path);
    if (t->p.n_data < 1) return sti_fail(err, STILL_E_ARG, "no training data is given");
    return STILL_OK;
}

static still_status prepare(sti_trainer *t, bool plan_only, still_error *err)
{
    STI_TRY(sti_trainer_begin(t, err));
    const bool first = sti_comm_rank(t->comm) == 0;
    still_status st = check_data(t, err);
    if (st == STILL_OK && first && !plan_only) st = make_folder(t, err);
    STI_TRY(sti_comm_agree(t->comm, 0, st, err));
    st = open_data(t, err);
    /* Remove the empty folder, so that the next attempt can use the name. */
    if (st != STILL_OK && first && !plan_only && !t->p.resume) rmdir(t->p.out);
    return st;
}

/* ---- The run ------------------------------------------------------------- */

typedef struct clock_of_stage {
    double start, saved;
    uint64_t first; /* step it started at */
} clock_of_stage;

static still_status save(sti_trainer *t, clock_of_stage *c, still_error *err)
{
    still_status st = STILL_OK;
    if (sti_comm_rank(t->comm) == 0) st = sti_checkpoint_write(t, err);
    c->saved = sti_now();
    return sti_comm_agree(t->comm, 0, st, err);
}

static uint64_t between(uint64_t low, uint64_t x, uint64_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* Ten validations of eight sequences in a long run; fewer and smaller ones in a
 * short run, so that training dominates the time. */
static bool time_to_validate(const sti_trainer *t)
{
    const uint64_t times = between(1, t->steps * (uint64_t)t->p.batch / 20, 10);
    const uint64_t every =
        t->p.validate_every ? t->p.validate_every : (t->steps + times - 1) / times;
    return sti_data_get_report(t->data)->valid > 0 &&
           (t->step % every == 0 || t->step == t->steps);
}

/* Validation leaves the step's sums alone, but for those by head. */
static still_status validate(sti_trainer *t, double *heads, still_train_progress *p,
                             still_error *err)
{
    const size_t L = (size_t)t->m->cfg.layers;
    double *sums = sti_alloc(2 * L, sizeof *sums);
    if (!sums) return sti_fail_memory(err, "validation", 0);
    sti_tally tally = {.err2 = sums, .ref2 = sums + L, .heads = heads};
    const uint64_t most = between(1, t->steps * (uint64_t)t->p.batch / 50, 8);
    still_status st = sti_step_validate(t, most, &tally, err);
    if (st == STILL_OK) {
        p->valid_loss = tally.loss;
        if (t->stage == 1) p->valid_relative = sti_tally_relative(t, &tally);
    }
    free(sums);
    return st;
}

static still_status one_step(sti_trainer *t, clock_of_stage *c, sti_tally *tally,
                             still_train_progress *p, still_error *err)
{
    *p = (still_train_progress){
        .stage = t->stage, .steps = t->steps, .valid_loss = NAN, .valid_relative = NAN};
    still_status st = sti_step_run(t, tally, err);
    p->lr = sti_schedule(t->p.lr[t->stage], t->step, t->steps, t->p.warmup);
    if (st == STILL_OK) st = sti_optimizer_step(t, &p->norm, err);
    /* All ranks see a NaN, since it is in their sums. */
    if (st == STILL_E_NUMERIC) return sti_comm_agree(t->comm, 0, st, err);
    if (st != STILL_OK) return st;
    t->step++;
    t->tokens += tally->rows;
    p->step = t->step;
    p->tokens = t->tokens;
    p->loss = tally->loss;
    p->kl = tally->kl;
    p->relative = t->stage == 1 ? sti_tally_relative(t, tally) : NAN;
    const double seconds = sti_now() - c->start;
    const double done = (double)(t->step - c->first);
    p->tokens_per_s = done * t->p.batch * t->p.seq / seconds;
    p->seconds_left = seconds / done * (double)(t->steps - t->step);
    if (time_to_validate(t)) {
        const double begun = sti_now();
        STI_TRY(validate(t, t->stage == 1 ? tally->heads : NULL, p, err));
        c->start += sti_now() - begun; /* not part of the rate */
    }
    p->peak_rss = sti_peak_rss();
    if (sti_comm_rank(t->comm) == 0) st = sti_report_step(t, p, tally, err);
    return sti_comm_agree(t->comm, 0, st, err);
}

/* Steps until the stage is done or the callback says stop. */
static still_status run_stage(sti_trainer *t, sti_tally *tally,
                              still_train_progress *last, still_error *err)
{
    clock_of_stage c = {.start = sti_now(), .saved = sti_now(), .first = t->step};
    while (t->step < t->steps) {
        STI_TRY(one_step(t, &c, tally, last, err));
        bool stop =
            t->p.each && sti_comm_rank(t->comm) == 0 && !t->p.each(t->p.user, last);
        bool due = t->p.save_every ? t->step % t->p.save_every == 0
                                   : sti_now() - c.saved > SAVE_SECONDS;
        STI_TRY(sti_comm_any(t->comm, &stop, err));
        STI_TRY(sti_comm_any(t->comm, &due, err));
        /* After the very last step only the result remains to be written. */
        if (t->step == t->steps && (t->stage == 2 || !t->stage_steps[2])) stop = false;
        if (stop || (due && t->step < t->steps)) STI_TRY(save(t, &c, err));
        if (stop)
            return sti_fail(err, STILL_E_CANCELLED,
                            "stopped after step %llu of stage %d; the checkpoint is in "
                            "%s",
                            (unsigned long long)t->step, t->stage, t->p.out);
    }
    return STILL_OK;
}

static still_status next_stage(sti_trainer *t, still_error *err)
{
    const size_t bytes = t->adapter->n_values * sizeof(float);
    STI_TRY(t->m->be->mem_clear(t->m->dev, t->moment1, bytes, err));
    STI_TRY(t->m->be->mem_clear(t->m->dev, t->moment2, bytes, err));
    t->stage = 2;
    t->step = t->tokens = 0;
    t->steps = t->stage_steps[2];
    return STILL_OK;
}

static still_status finish_run(sti_trainer *t, const still_train_progress *last,
                               still_error *err)
{
    char path[STI_PATH_ROOM];
    STI_TRY(sti_adapter_pull(t->adapter, err));
    STI_TRY(sti_adapter_write(t->adapter, t->p.out, err));
    STI_TRY(sti_report_card(t, last, err));
    if (sti_path_join(path, t->p.out, STI_CHECKPOINT, NULL) == STILL_OK) unlink(path);
    return STILL_OK;
}

static void note_broken(const sti_trainer *t)
{
    const sti_data_report *r = sti_data_get_report(t->data);
    char line[512];
    if (r->broken == 0 || !t->p.note || sti_comm_rank(t->comm) > 0) return;
    snprintf(line, sizeof line, "%llu records of the data are broken and left out: %s",
             (unsigned long long)r->broken, r->first_broken);
    t->p.note(t->p.user, line);
}

/* Continues from the checkpoint in the folder. */
static still_status go_on(sti_trainer *t, still_error *err)
{
    STI_TRY(sti_comm_settle(t->comm, sti_checkpoint_read(t, err), err));
    still_status st = STILL_OK;
    if (sti_comm_rank(t->comm) == 0) {
        sti_checkpoint_sweep(t->p.out);
        st = sti_report_rewind(t, err);
    }
    return sti_comm_agree(t->comm, 0, st, err);
}

static still_status run(sti_trainer *t, still_error *err)
{
    STI_TRY(prepare(t, false, err));
    note_broken(t);
    if (t->p.resume)
        STI_TRY(go_on(t, err));
    else
        STI_TRY(save(t, &(clock_of_stage){0}, err)); /* a full disk shows at once */
    const size_t L = (size_t)t->m->cfg.layers, H = (size_t)t->m->cfg.heads;
    double *sums = sti_alloc(2 * L + 2 * L * H, sizeof *sums);
    if (!sums) return sti_fail_memory(err, "training", 0);
    sti_tally tally = {.err2 = sums, .ref2 = sums + L, .heads = sums + 2 * L};
    still_train_progress last = {.stage = t->stage, .loss = NAN};
    still_status st = run_stage(t, &tally, &last, err);
    if (st == STILL_OK && t->stage == 1 && t->stage_steps[2]) {
        st = next_stage(t, err);
        if (st == STILL_OK) st = save(t, &(clock_of_stage){0}, err);
        if (st == STILL_OK) st = run_stage(t, &tally, &last, err);
    }
    free(sums);
    if (st != STILL_OK) return st;
    if (sti_comm_rank(t->comm) == 0) st = finish_run(t, &last, err);
    return sti_comm_agree(t->comm, 0, st, err);
}

/* Only the rank on which a failure happened reports it. */
static still_status end(sti_trainer *t, still_status st, still_error *err)
{
    const int failed = sti_comm_failed_rank(t->comm);
    if (st != STILL_OK && failed >= 0 && failed != sti_comm_rank(t->comm) && err)
        err->text[0] = 0;
    sti_trainer_end(t, st);
    return st;
}

still_status still_linearize(still_model *m, const still_train_params *p,
                             still_error *err)
{
    sti_trainer t = {.m = m};
    STI_TRY(STI_TAKE(&t.p, p, still_train_params, err));
    return end(&t, run(&t, err), err);
}

/* ---- Planning ------------------------------------------------------------ */

static uint64_t trained_in(const sti_trainer *t, int stage)
{
    uint64_t n = 0;
    for (size_t i = 0; i < t->adapter->n_entries; i++)
        if (sti_trains(t, stage, &t->adapter->entry[i])) n += t->adapter->entry[i].n;
    return n;
}

/* One sequence of a stage, timed. */
static still_status time_stage(sti_trainer *t, int stage, double *seconds,
                               still_error *err)
{
    const size_t L = (size_t)t->m->cfg.layers;
    double *sums = sti_alloc(2 * L, sizeof *sums);
    if (!sums) return sti_fail_memory(err, "plan", 0);
    sti_tally tally = {.err2 = sums, .ref2 = sums + L};
    t->stage = stage;
    t->p.batch = t->micro_batch * sti_comm_size(t->comm);
    const double start = sti_now();
    still_status st = sti_step_run(t, &tally, err);
    *seconds = sti_now() - start;
    free(sums);
    return st;
}

static still_status plan(sti_trainer *t, still_train_plan *out, still_error *err)
{
    STI_TRY(prepare(t, true, err));
    const sti_data_report *r = sti_data_get_report(t->data);
    *out = (still_train_plan){
        .records = r->records, .broken = r->broken, .rank = sti_comm_rank(t->comm)};
    snprintf(out->first_broken, sizeof out->first_broken, "%s", r->first_broken);
    const int batch = t->p.batch;
    for (int s = 1; s <= 2; s++) {
        double seconds;
        if (!t->stage_steps[s]) continue;
        STI_TRY(time_stage(t, s, &seconds, err));
        out->steps[s] = t->stage_steps[s];
        out->tokens[s] = t->stage_steps[s] * (uint64_t)batch * (uint64_t)t->p.seq;
        out->trained[s] = trained_in(t, s);
        out->seconds[s] = seconds * (double)t->stage_steps[s] * batch /
                          (t->micro_batch * sti_comm_size(t->comm));
        out->bytes[s] = sti_peak_rss();
    }
    return STILL_OK;
}

still_status still_linearize_plan(still_model *m, const still_train_params *p,
                                  still_train_plan *out, still_error *err)
{
    sti_trainer t = {.m = m};
    STI_TRY(STI_TAKE(&t.p, p, still_train_params, err));
    return end(&t, plan(&t, out, err), err);
}
