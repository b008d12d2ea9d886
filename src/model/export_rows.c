/* export_rows.c - the numbers of exported tensors, a few rows at a time.
 *
 * A tensor that is wanted as it lies in its file is copied byte for byte. Any other
 * goes through floats: row = dequant(source row) + scale * b[row] a, in the order and
 * type of the target. Pages of the source leave memory when a tensor is done. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/export.h"

enum { PIECE = 1 << 20 }; /* bytes handed to the file at once */

typedef struct rows {
    const sti_export_tensor *t;
    int64_t n, cols;
    size_t src_bytes, dst_bytes, b_bytes; /* of a row */
    int rank, head;
    float scale;
    float *a;           /* [rank, cols] */
    float *b;           /* [rank] */
    float *row, *moved; /* [cols] */
    unsigned char *piece;
    int64_t capacity; /* rows of a piece */
} rows;

/* A vector is one row, unless its elements change places. */
static void measure(const sti_export_tensor *t, int64_t *n, int64_t *cols)
{
    const int last = t->src->n_dims - 1;
    const bool column = last == 0 && t->order != STI_ROWS_KEPT;
    *cols = column ? 1 : t->src->dim[last];
    *n = column ? t->src->dim[0] : 1;
    for (int d = 0; d < last; d++) *n *= t->src->dim[d];
}

/* Where number r of the target's order lies in the source's, D to a head. */
static int64_t place(sti_row_order order, int64_t r, int D)
{
    const int64_t head = r / D * D, i = r % D, half = D / 2;
    switch (order) {
    case STI_ROWS_TO_HALVES: return head + 2 * (i % half) + i / half;
    case STI_ROWS_TO_PAIRS: return head + i % 2 * half + i / 2;
    default: return r;
    }
}

static void rows_free(rows *r)
{
    free(r->a);
    free(r->b);
    free(r->row);
    free(r->moved);
    free(r->piece);
}

static still_status rows_new(const sti_export *x, const sti_export_tensor *t, rows *r,
                             still_error *err)
{
    *r = (rows){.t = t, .head = x->cfg.head_dim};
    measure(t, &r->n, &r->cols);
    if (!sti_dtype_bytes(t->src->type, (uint64_t)r->cols, &r->src_bytes) ||
        !sti_dtype_bytes(t->type, (uint64_t)r->cols, &r->dst_bytes))
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "%s: tensor '%s' has rows of %lld numbers, which type %s cannot "
            "hold",
            t->src->path, t->src->name, (long long)r->cols,
            sti_dtype_find((int)t->type)->name);
    if (t->b) {
        r->rank = x->spec.lora.rank;
        r->scale = x->spec.lora.alpha / (float)r->rank;
        if (!sti_dtype_bytes(t->b->type, (uint64_t)r->rank, &r->b_bytes))
            return sti_fail(err, STILL_E_FORMAT,
                            "%s: tensor '%s' has type %s, which %d numbers do not fill",
                            t->b->path, t->b->name,
                            sti_dtype_find((int)t->b->type)->name, r->rank);
    }
    const size_t cols = (size_t)r->cols, rank = (size_t)r->rank;
    r->capacity = r->dst_bytes < PIECE ? (int64_t)(PIECE / r->dst_bytes) : 1;
    if (r->capacity > r->n) r->capacity = r->n;
    r->a = rank ? sti_alloc(rank * cols, sizeof *r->a) : NULL;
    r->b = rank ? sti_alloc(rank, sizeof *r->b) : NULL;
    r->row = sti_alloc(cols, sizeof *r->row);
    r->moved = sti_alloc(cols, sizeof *r->moved);
    r->piece = sti_alloc((size_t)r->capacity, r->dst_bytes);
    if ((rank && (!r->a || !r->b)) || !r->row || !r->moved || !r->piece)
        return sti_fail_memory(err, t->name, PIECE);
    if (rank) sti_dequant(t->a->type, t->a->data, r->a, (int64_t)(rank * cols));
    return STILL_OK;
}

/* Row i of the target, as floats in r->row. */
static void make_row(const sti_config *c, rows *r, int64_t i)
{
    const sti_export_tensor *t = r->t;
    const int64_t s = place(t->order, i, r->head);
    sti_dequant(t->src->type, (const char *)t->src->data + (size_t)s * r->src_bytes,
                r->row, r->cols);
    if (t->b) {
        const int64_t in_b =
            t->rotary ? s - s % r->head + sti_rotary_place(c, (int)(s % r->head)) : s;
        sti_dequant(t->b->type, (const char *)t->b->data + (size_t)in_b * r->b_bytes,
                    r->b, r->rank);
        const sti_lora_values add = {.a = r->a, .rank = r->rank, .scale = r->scale};
        sti_merge_row(&add, r->b, r->cols, r->row);
    }
    for (int64_t j = 0; t->factor != 0 && j < r->cols; j++)
        r->row[j] = (float)(((double)r->row[j] + t->offset) * t->factor);
    if (!t->columns) return;
    memcpy(r->moved, r->row, (size_t)r->cols * sizeof *r->row);
    for (int64_t j = 0; j < r->cols; j++)
        r->row[j] = r->moved[place(t->order, j, r->head)];
}

static still_status check_row(const rows *r, still_error *err)
{
    const float most = r->t->type == STI_F16 ? 65504.0f : INFINITY;
    for (int64_t j = 0; j < r->cols; j++) {
        if (fabsf(r->row[j]) <= most && isfinite(r->row[j])) continue;
        return sti_fail(
            err, STILL_E_NUMERIC,
            "%s: tensor '%s' holds %g, which type %s cannot: choose another "
            "type",
            r->t->src->path, r->t->src->name, r->row[j],
            sti_dtype_find((int)r->t->type)->name);
    }
    return STILL_OK;
}

static still_status report(sti_export *x, size_t bytes, still_error *err)
{
    x->done += bytes;
    if (!x->p->progress || x->p->progress(x->p->user, x->done, x->total))
        return STILL_OK;
    return sti_fail(err, STILL_E_CANCELLED, "%s: export was cancelled", x->path);
}

static still_status write_rows(sti_export *x, rows *r, sti_writer *w, still_error *err)
{
    for (int64_t i = 0; i < r->n;) {
        size_t used = 0;
        for (int64_t k = 0; k < r->capacity && i < r->n; k++, i++) {
            make_row(&x->cfg, r, i);
            STI_TRY(check_row(r, err));
            if (!sti_quant(r->t->type, r->row, r->piece + used, r->cols))
                return sti_fail(
                    err, STILL_E_UNSUPPORTED,
                    "%s: tensor '%s': numbers cannot be turned into type %s",
                    r->t->src->path, r->t->src->name,
                    sti_dtype_find((int)r->t->type)->name);
            used += r->dst_bytes;
        }
        STI_TRY(sti_writer_data(w, r->piece, used, err));
        STI_TRY(report(x, used, err));
    }
    return STILL_OK;
}

static still_status copy_bytes(sti_export *x, const sti_tensor *t, sti_writer *w,
                               still_error *err)
{
    for (size_t at = 0; at < t->bytes; at += PIECE) {
        const size_t n = t->bytes - at < PIECE ? t->bytes - at : PIECE;
        STI_TRY(sti_writer_data(w, (const char *)t->data + at, n, err));
        STI_TRY(report(x, n, err));
    }
    return STILL_OK;
}

static still_status write_tensor(sti_export *x, const sti_export_tensor *t,
                                 sti_writer *w, still_error *err)
{
    if (t->type == t->src->type && t->order == STI_ROWS_KEPT && !t->b && t->factor == 0)
        return copy_bytes(x, t->src, w, err);
    rows r;
    still_status st = rows_new(x, t, &r, err);
    if (st == STILL_OK) st = write_rows(x, &r, w, err);
    rows_free(&r);
    return st;
}

uint64_t sti_export_bytes(const sti_export_list *l)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < l->n; i++) {
        int64_t n, cols;
        size_t bytes = 0;
        measure(&l->tensor[i], &n, &cols);
        if (sti_dtype_bytes(l->tensor[i].type, (uint64_t)cols, &bytes))
            sum += (uint64_t)n * bytes;
    }
    return sum;
}

still_status sti_export_write(sti_export *x, const sti_export_list *l, sti_writer *w,
                              still_error *err)
{
    for (size_t i = 0; i < l->n;) {
        const sti_export_tensor *t = &l->tensor[i];
        int64_t dim[4];
        memcpy(dim, t->src->dim, sizeof dim);
        for (i++; i < l->n && l->tensor[i].joined; i++)
            dim[0] += l->tensor[i].src->dim[0];
        STI_TRY(sti_writer_tensor(w, t->name, t->type, t->src->n_dims, dim, err));
    }
    for (size_t i = 0; i < l->n; i++) {
        const sti_export_tensor *t = &l->tensor[i];
        STI_TRY(write_tensor(x, t, w, err));
        if (t->src != &x->rope[0] && t->src != &x->rope[1])
            sti_map_drop(t->src->data, t->src->bytes);
    }
    return STILL_OK;
}

still_status sti_export_own_tensors(sti_export *x, const sti_export_list *l,
                                    const sti_adapter_spec *spec, const char *path,
                                    bool gguf, still_error *err)
{
    sti_writer *w;
    STI_TRY(sti_adapter_writer(spec, path, gguf, &w, err));
    const still_status st = sti_export_write(x, l, w, err);
    if (st == STILL_OK) return sti_writer_finish(w, err);
    sti_writer_abort(w);
    return st;
}

still_status sti_export_tensors(sti_export *x, const sti_export_list *l,
                                const char *path, still_error *err)
{
    sti_writer *w;
    json_t *meta = json_pack("{s:s}", "format", "pt");
    still_status st = meta ? sti_writer_safetensors(path, meta, &w, err)
                           : sti_fail_memory(err, path, 0);
    json_decref(meta);
    STI_TRY(st);
    st = sti_export_write(x, l, w, err);
    if (st == STILL_OK) return sti_writer_finish(w, err);
    sti_writer_abort(w);
    return st;
}
