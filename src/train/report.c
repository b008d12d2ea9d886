/* report.c - reports of a run: train.jsonl, one line per step, and the README card
 * of the folder. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "train/train.h"

static json_t *ratio(double err2, double ref2)
{
    return sti_json_of_real(ref2 > 0 ? err2 / ref2 : 0);
}

/* A list a layer that was converted. */
static json_t *by_head(const sti_trainer *t, const double *heads)
{
    json_t *layers = json_array();
    const int H = t->m->cfg.heads;
    for (int l = t->cfg.first; l <= t->cfg.last; l++) {
        if (!sti_attn_converts(&t->cfg, l)) continue;
        const double *sums = heads + 2 * (size_t)l * (size_t)H;
        json_t *layer = json_array();
        for (int h = 0; h < H; h++)
            sti_json_append(&layer, ratio(sums[2 * h], sums[2 * h + 1]));
        sti_json_append(&layers, layer);
    }
    return layers;
}

still_status sti_report_step(const sti_trainer *t, const still_train_progress *p,
                             const sti_tally *tally, still_error *err)
{
    char path[STI_PATH_ROOM];
    STI_TRY(sti_path_join(path, t->p.out, "train.jsonl", err));
    json_t *o = json_object();
    sti_json_set(&o, "stage", json_integer(p->stage));
    sti_json_set(&o, "step", json_integer((json_int_t)p->step));
    sti_json_set(&o, "tokens", json_integer((json_int_t)p->tokens));
    sti_json_set_real(&o, "loss", p->loss);
    sti_json_set_real(&o, "norm", p->norm);
    sti_json_set_real(&o, "lr", p->lr);
    if (p->stage == 1) {
        json_t *layers = json_array();
        for (int l = t->cfg.first; l <= t->cfg.last; l++)
            if (sti_attn_converts(&t->cfg, l))
                sti_json_append(&layers, ratio(tally->err2[l], tally->ref2[l]));
        sti_json_set_real(&o, "relative", p->relative);
        sti_json_set(&o, "relative_by_layer", layers);
    } else if (t->p.kd > 0) {
        sti_json_set_real(&o, "kl", p->kl);
    }
    sti_json_set_real(&o, "valid_loss", p->valid_loss);
    if (p->stage == 1) sti_json_set_real(&o, "valid_relative", p->valid_relative);
    if (p->stage == 1 && isfinite(p->valid_relative) && t->m->be->host_memory)
        sti_json_set(&o, "valid_relative_by_head", by_head(t, tally->heads));
    sti_json_set_real(&o, "tokens_per_s", p->tokens_per_s);
    sti_json_set(&o, "peak_rss", json_integer((json_int_t)p->peak_rss));
    char *line = sti_json_text(o, JSON_COMPACT | JSON_REAL_PRECISION(9));
    json_decref(o);
    if (!line) return sti_fail_memory(err, path, 0);
    const size_t n = strlen(line);
    line[n] = '\n'; /* over the NUL: it goes out by its length */
    int fd;
    still_status st = sti_open_own(path, O_WRONLY | O_APPEND, &fd, err);
    if (st == STILL_OK && !sti_write_all(fd, line, n + 1))
        st = sti_fail_write(err, path, errno);
    if (fd >= 0 && close(fd) != 0 && st == STILL_OK)
        st = sti_fail_write(err, path, errno);
    free(line);
    return st;
}

/* Whether a line is of a step that the checkpoint includes. One that is no JSON, cut off
 * by a crash, is not. */
static still_status is_past(const sti_trainer *t, const char *line, size_t n,
                            bool *past, still_error *err)
{
    json_t *o;
    if (sti_json_read_line(line, n, 0, &o, err) == STILL_E_MEMORY)
        return STILL_E_MEMORY;
    const json_int_t stage = json_integer_value(json_object_get(o, "stage")),
                     step = json_integer_value(json_object_get(o, "step"));
    json_decref(o);
    *past = stage > 0 &&
            (stage < t->stage || (stage == t->stage && step <= (json_int_t)t->step));
    return STILL_OK;
}

still_status sti_report_rewind(const sti_trainer *t, still_error *err)
{
    char path[STI_PATH_ROOM];
    STI_TRY(sti_path_join(path, t->p.out, "train.jsonl", err));
    if (access(path, F_OK) != 0) return STILL_OK;
    sti_lines *lines;
    sti_buf keep = {0};
    STI_TRY(sti_lines_open(path, &lines, err));
    still_status st;
    for (;;) {
        char *line;
        size_t n;
        st = sti_lines_next(lines, &line, &n, err);
        if (st != STILL_OK || !line) break;
        bool past;
        if ((st = is_past(t, line, n, &past, err)) != STILL_OK) break;
        if (!past) continue;
        sti_buf_put(&keep, line, n);
        sti_buf_puts(&keep, "\n");
    }
    sti_lines_close(lines);
    if (st == STILL_OK && keep.failed) st = sti_fail_memory(err, path, keep.n);
    if (st == STILL_OK) st = sti_write_text(path, keep.p ? keep.p : "", err);
    sti_buf_free(&keep);
    return st;
}

still_status sti_report_card(const sti_trainer *t, const still_train_progress *last,
                             still_error *err)
{
    char path[STI_PATH_ROOM];
    const still_train_params *p = &t->p;
    const still_method *m = &p->method;
    const char *base = t->adapter->spec.base_name;
    sti_buf b = {0};
    STI_TRY(sti_path_join(path, t->p.out, "README.md", err));
    sti_buf_printf(&b, "# %s, linearized\n\n", base);
    sti_buf_printf(&b,
                   "An adapter for `%s`, trained with still %s. It turns the model's "
                   "softmax attention into `%s`: constant memory, linear time.\n\n"
                   "    still chat FOLDER\n\n",
                   base, still_version(), m->name);
    sti_buf_puts(&b, "| | |\n|-|-|\n");
    sti_buf_printf(
        &b, "| method | %s, chunk %d, select %d, cap %d%s%s, score %s, heads %s |\n",
        m->name, m->chunk, m->select, m->cap, m->caps[0] ? ", layers " : "", m->caps,
        m->score, m->per_head ? "per head" : "shared");
    if (m->key_bits || m->value_bits)
        sti_buf_printf(&b, "| salient tokens | keys in %d bits, values in %d |\n",
                       m->key_bits ? m->key_bits : 16,
                       m->value_bits ? m->value_bits : 16);
    sti_buf_printf(&b, "| layers | %d-%d, %d of them converted |\n", t->cfg.first,
                   t->cfg.last, sti_attn_converted(&t->cfg));
    for (int s = 1; s <= 2; s++)
        if (t->stage_steps[s])
            sti_buf_printf(
                &b, "| stage %d | %llu steps of %d x %d tokens, peak rate %g |\n", s,
                (unsigned long long)t->stage_steps[s], p->batch, p->seq, p->lr[s]);
    if (t->stage_steps[2])
        sti_buf_printf(&b, "| LoRA | rank %d, alpha %g, dropout %g |\n", p->lora_rank,
                       p->lora_alpha, p->lora_dropout);
    for (int i = 0; i < p->n_data; i++) {
        const char *name = strrchr(p->data[i].path, '/');
        sti_buf_printf(&b, "| data | %s |\n", name ? name + 1 : p->data[i].path);
    }
    const sti_data_report *r = sti_data_get_report(t->data);
    sti_buf_printf(&b, "| records | %llu, %llu left out as broken |\n",
                   (unsigned long long)r->records, (unsigned long long)r->broken);
    sti_buf_printf(&b, "| last loss | %.4f (stage %d) |\n", last->loss, last->stage);
    sti_buf_puts(&b, "\nThe licence of the base model and of the data apply to this "
                     "adapter. train.jsonl has every step's figures.\n");
    still_status st =
        b.failed ? sti_fail_memory(err, path, b.n) : sti_write_text(path, b.p, err);
    sti_buf_free(&b);
    return st;
}
