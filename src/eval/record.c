/* record.c - an answered item as JSON, and the result of many of them. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "eval/eval.h"

/* ---- Records ------------------------------------------------------------- */

int sti_record_pick(const double *sum, const int *length, int n)
{
    int best = 0;
    for (int i = 1; i < n; i++) {
        /* An empty choice has no length to divide by: it counts as one character. */
        const double a = length ? sum[i] / (length[i] > 0 ? length[i] : 1) : sum[i],
                     b = length ? sum[best] / (length[best] > 0 ? length[best] : 1)
                                : sum[best];
        if (a > b) best = i;
    }
    return best;
}

static void put_choice(json_t *o, const sti_item *it, const sti_answer *a)
{
    json_t *sums = json_array(), *lengths = json_array();
    int length[STI_MOST_OPTIONS];
    for (int i = 0; i < it->n_options; i++) {
        length[i] = it->option[i].length;
        json_array_append_new(sums, json_real(a->sum[i]));
        json_array_append_new(lengths, json_integer(length[i]));
    }
    json_object_set_new(o, "sums", sums);
    json_object_set_new(o, "lengths", lengths);
    if (it->greedy) {
        json_object_set_new(o, "correct", json_boolean(a->greedy));
        json_object_set_new(o, "nll", json_real(-a->sum[0]));
        return;
    }
    const int picked = sti_record_pick(a->sum, NULL, it->n_options),
              norm = sti_record_pick(a->sum, length, it->n_options);
    json_object_set_new(o, "picked", json_integer(picked));
    json_object_set_new(o, "picked_norm", json_integer(norm));
    json_object_set_new(o, "gold", json_integer(it->gold));
    json_object_set_new(o, "correct", json_boolean(picked == it->gold));
    json_object_set_new(o, "correct_norm", json_boolean(norm == it->gold));
}

/* A model's output may end inside a character; invalid UTF-8 is dropped. */
static void put_output(json_t *o, const sti_eval_task *t, const sti_item *it,
                       const sti_answer *a)
{
    json_t *expected = json_array(), *text = json_string(a->output);
    for (int i = 0; i < it->n_expected; i++)
        json_array_append_new(expected, json_string(it->expected[i]));
    const double score = t->score(it, a->output);
    json_object_set_new(o, "output", text ? text : json_string(""));
    json_object_set_new(o, "expected", expected);
    json_object_set_new(o, "score", json_real(score));
    json_object_set_new(o, "correct", json_boolean(score >= 1));
}

json_t *sti_record_make(const char *run, const sti_eval_task *t, const sti_item *it,
                        const sti_answer *a)
{
    json_t *o = json_pack("{s:s,s:s,s:s}", "run", run, "task", t->name, "id", it->id);
    if (!o) return NULL;
    if (it->kind == STI_ITEM_CHOICE)
        put_choice(o, it, a);
    else
        put_output(o, t, it, a);
    if (a->cut) json_object_set_new(o, "cut", json_true());
    if (a->plain) json_object_set_new(o, "plain", json_true());
    return o;
}

/* ---- Results ------------------------------------------------------------- */

void sti_tally_add(sti_tally *t, const json_t *record)
{
    const json_t *score = json_object_get(record, "score"),
                 *norm = json_object_get(record, "correct_norm"),
                 *nll = json_object_get(record, "nll");
    const double x = score ? json_number_value(score)
                           : json_is_true(json_object_get(record, "correct"));
    t->n++;
    t->right += x;
    t->right2 += x * x;
    t->cut += json_is_true(json_object_get(record, "cut"));
    t->plain += json_is_true(json_object_get(record, "plain"));
    if (norm) {
        t->has_norm = true;
        t->right_norm += json_is_true(norm);
        t->right_norm2 += json_is_true(norm);
    }
    if (nll) {
        t->has_nll = true;
        t->nll += json_number_value(nll);
    }
}

/* The mean and its standard error, sd / sqrt(n), with n - 1 in the variance. */
static void mean_of(double sum, double squares, uint64_t count, double *mean,
                    double *error)
{
    const double n = (double)count;
    *mean = count ? sum / n : NAN;
    const double variance = count > 1 ? (squares - n * *mean * *mean) / (n - 1) : NAN;
    *error = variance > 0 ? sqrt(variance / n) : count > 1 ? 0 : NAN;
}

void sti_tally_result(const sti_tally *t, still_eval_result *out)
{
    out->n = t->n;
    out->cut = t->cut;
    out->plain = t->plain;
    mean_of(t->right, t->right2, t->n, &out->acc, &out->acc_stderr);
    out->acc_norm = out->acc_norm_stderr = out->perplexity = NAN;
    if (t->has_norm)
        mean_of(t->right_norm, t->right_norm2, t->n, &out->acc_norm,
                &out->acc_norm_stderr);
    if (t->has_nll) out->perplexity = exp(t->nll / (double)t->n);
}
