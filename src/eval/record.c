/* record.c - an answered item as JSON, and the result of many of them. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
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

static void put_choice(json_t **o, const sti_item *it, const sti_answer *a)
{
    json_t *sums = json_array(), *lengths = json_array();
    int length[STI_MOST_OPTIONS];
    for (int i = 0; i < it->n_options; i++) {
        length[i] = it->option[i].length;
        sti_json_append(&sums, sti_json_of_real(a->sum[i]));
        sti_json_append(&lengths, json_integer(length[i]));
    }
    sti_json_set(o, "sums", sums);
    sti_json_set(o, "lengths", lengths);
    if (it->greedy) {
        sti_json_set(o, "correct", json_boolean(a->greedy));
        sti_json_set_real(o, "nll", -a->sum[0]);
        return;
    }
    const int picked = sti_record_pick(a->sum, NULL, it->n_options),
              norm = sti_record_pick(a->sum, length, it->n_options);
    sti_json_set(o, "picked", json_integer(picked));
    sti_json_set(o, "picked_norm", json_integer(norm));
    sti_json_set(o, "gold", json_integer(it->gold));
    sti_json_set(o, "correct", json_boolean(picked == it->gold));
    sti_json_set(o, "correct_norm", json_boolean(norm == it->gold));
}

/* A model's output may end inside a character; invalid UTF-8 is dropped. */
static void put_output(json_t **o, const sti_eval_task *t, const sti_item *it,
                       const sti_answer *a)
{
    json_t *expected = json_array();
    const size_t n = strlen(a->output);
    const bool valid = sti_utf8_span(a->output, n) == n;
    for (int i = 0; i < it->n_expected; i++)
        sti_json_append(&expected, json_string(it->expected[i]));
    const double score = t->score(it, a->output);
    sti_json_set(o, "output", json_string(valid ? a->output : ""));
    sti_json_set(o, "expected", expected);
    sti_json_set(o, "score", json_real(score));
    sti_json_set(o, "correct", json_boolean(score >= 1));
}

json_t *sti_record_make(const char *run, const sti_eval_task *t, const sti_item *it,
                        const sti_answer *a)
{
    json_t *o = json_pack("{s:s,s:s,s:s}", "run", run, "task", t->name, "id", it->id);
    if (it->kind == STI_ITEM_CHOICE)
        put_choice(&o, it, a);
    else
        put_output(&o, t, it, a);
    if (a->cut) sti_json_set(&o, "cut", json_true());
    if (a->plain) sti_json_set(&o, "plain", json_true());
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
