/* weight.c - weights on the device, in the layouts of kernels.h.
 *
 * One allocation a weight: what it is multiplied from, its scales, and, in small
 * models, a copy in half for products of many rows. Without that copy the half matrix is
 * made in scratch before each such product, which below a few hundred rows costs more
 * than the product; but copies of a large model would take three times its own memory.
 * Sources go over the bus in slabs; their pages are given back. */
#include "backend/cuda/dense/kernels.h"

enum {
    SLAB = 32 << 20,     /* bytes on the bus at a time */
    COPIES = 512 << 20,  /* bytes of all copies of a device, at most */
    COPIES_OF_LIMIT = 16 /* and this part of the memory that it was given */
};

/* sti_weight.layout: kind, and these. */
enum { KIND = 7, FINE = 8, COPY = 16 }; /* FINE: groups of 16, else of 32 */

/* Where the parts of `own` begin. */
typedef struct parts {
    size_t scale, half, total;
} parts;

/* Kind and groups of a type; -1: not supported. */
static int layout_of(sti_dtype t)
{
    switch (t) {
    case STI_F32: return STI_CUDA_FLOAT;
    case STI_F16:
    case STI_BF16: return STI_CUDA_HALF;
    case STI_Q4_0:
    case STI_Q4_1:
    case STI_Q4_K: return STI_CUDA_U4;
    case STI_Q2_K:
    case STI_Q3_K: return STI_CUDA_U4 | FINE;
    case STI_Q5_0:
    case STI_IQ4_NL:
    case STI_IQ4_XS:
    case STI_MXFP4:
    case STI_Q8_0: return STI_CUDA_S8;
    case STI_Q6_K: return STI_CUDA_S8 | FINE;
    case STI_Q5_1:
    case STI_Q5_K: return STI_CUDA_S8_MIN;
    default: return -1;
    }
}

/* a * b, or so much that no allocation succeeds. */
static size_t product(size_t a, size_t b)
{
    size_t n;
    return sti_mul(a, b, &n) && n < SIZE_MAX / 16 ? n : SIZE_MAX / 16;
}

static parts parts_of(int64_t N, int64_t K, int layout)
{
    const size_t n = (size_t)N, k = (size_t)K;
    const size_t half = product(n, product(sti_cuda_round_up(k, 8), sizeof(sti_half)));
    parts p = {0};
    switch (layout & KIND) {
    case STI_CUDA_FLOAT: p.total = product(n, product(k, sizeof(float))); return p;
    case STI_CUDA_HALF: p.total = half; return p;
    default: break;
    }
    const int kind = layout & KIND;
    size_t tiles = product(sti_cuda_round_up(n, STI_CUDA_TILE) / STI_CUDA_TILE,
                           sti_cuda_round_up(k, STI_CUDA_CHUNK) / STI_CUDA_CHUNK);
    size_t numbers = product(tiles, STI_CUDA_TILE * STI_CUDA_CHUNK);
    size_t groups = numbers / (layout & FINE ? 16 : 32);
    p.scale = sti_cuda_round_up(kind == STI_CUDA_U4 ? numbers / 2 : numbers, 256);
    p.half =
        sti_cuda_round_up(p.scale + product(groups, kind == STI_CUDA_S8 ? 2 : 4), 256);
    p.total = p.half + (layout & COPY ? half : 0);
    return p;
}

/* Bytes of the copy in half that a layout has. */
static size_t copy_bytes(int64_t N, int64_t K, int layout)
{
    const parts p = parts_of(N, K, layout);
    return layout & COPY ? p.total - p.half : 0;
}

/* With a copy in half while these are few and much memory is free. */
static int choose_layout(const sti_dev *dev, const sti_tensor *t)
{
    const int layout = layout_of(t->type);
    if (layout < 0 || layout == STI_CUDA_FLOAT || layout == STI_CUDA_HALF)
        return layout;
    const size_t copy = copy_bytes(t->dim[0], t->dim[1], layout | COPY);
    size_t most = COPIES;
    if (dev->limit && dev->limit / COPIES_OF_LIMIT < most)
        most = dev->limit / COPIES_OF_LIMIT;
    if (dev->copies > most || copy > most - dev->copies) return layout;
    return sti_cuda_mem_left(dev) / 4 >= copy ? layout | COPY : layout;
}

size_t sti_cuda_weight_bytes(const sti_dev *dev, const sti_tensor *t)
{
    (void)dev;
    if (layout_of(t->type) < 0 || t->n_dims != 2 || t->dim[0] < 1 || t->dim[1] < 1)
        return 0;
    return parts_of(t->dim[0], t->dim[1], layout_of(t->type)).total;
}

sti_cuda_matrix sti_cuda_matrix_of(const sti_weight *w)
{
    const parts p = parts_of(w->N, w->K, w->layout);
    unsigned char *own = w->own.p ? w->own.p : (unsigned char *)w->data;
    sti_cuda_matrix m = {
        .w = own,
        .N = (int)w->N,
        .K = (int)w->K,
        .ld = (int)sti_cuda_round_up((size_t)w->K, 8),
        .chunks =
            (int)(sti_cuda_round_up((size_t)w->K, STI_CUDA_CHUNK) / STI_CUDA_CHUNK),
        .groups = w->layout & FINE ? 4 : 2,
        .kind = (sti_cuda_kind)(w->layout & KIND)};
    if (m.kind == STI_CUDA_HALF) m.half = w->own.p;
    if (p.scale) m.scale = own + p.scale;
    if (w->layout & COPY) m.half = (const sti_half *)(own + p.half);
    return m;
}

int sti_cuda_half_rows(const sti_cuda_matrix *m)
{
    const size_t row = (size_t)m->ld * sizeof(sti_half);
    const size_t rows = STI_CUDA_HALF_MOST / row / STI_CUDA_TILE * STI_CUDA_TILE;
    if (rows >= (size_t)m->N) return m->N;
    return rows > STI_CUDA_TILE ? (int)rows : STI_CUDA_TILE;
}

size_t sti_cuda_half_bytes(const sti_cuda_matrix *m)
{
    if (m->kind == STI_CUDA_FLOAT || m->half) return 0;
    return (size_t)sti_cuda_half_rows(m) * (size_t)m->ld * sizeof(sti_half);
}

sti_cuda_matrix sti_cuda_matrix_rows(const sti_cuda_matrix *m, int row0, int n)
{
    const size_t at = (size_t)(row0 / STI_CUDA_TILE) * (size_t)m->chunks;
    sti_cuda_matrix part = *m;
    part.N = n;
    part.half = NULL;
    part.w = (const char *)m->w +
             at * STI_CUDA_TILE * STI_CUDA_CHUNK / (m->kind == STI_CUDA_U4 ? 2 : 1);
    part.scale = (const char *)m->scale + at * STI_CUDA_TILE * (size_t)m->groups *
                                              (m->kind == STI_CUDA_S8 ? 2 : 4);
    return part;
}

static still_status check(const sti_tensor *t, const sti_dtype_info *info,
                          still_error *err)
{
    if (!info || layout_of(t->type) < 0)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: tensor '%s' has type %s, which the cuda backend cannot "
                        "multiply",
                        t->path, t->name, info ? info->name : "unknown");
    if (t->n_dims != 2 || t->dim[0] < 1 || t->dim[1] < 1 || t->dim[0] > INT32_MAX / 2 ||
        t->dim[1] > INT32_MAX / 8 || t->dim[1] % info->block != 0)
        return sti_fail(
            err, STILL_E_FORMAT,
            "%s: tensor '%s' is no matrix of whole rows of %s (%d dimensions, last "
            "%lld, "
            "block %d)",
            t->path, t->name, info->name, t->n_dims,
            (long long)(t->n_dims > 0 && t->n_dims <= 4 ? t->dim[t->n_dims - 1] : 0),
            info->block);
    return STILL_OK;
}

/* The source to the device, slab by slab, and into its layout there. */
static still_status upload(sti_dev *dev, const sti_tensor *t, const sti_weight *w,
                           still_error *err)
{
    const sti_cuda_matrix m = sti_cuda_matrix_of(w);
    if (m.kind == STI_CUDA_FLOAT) {
        STI_CUDA(cudaMemcpyAsync(w->own.p, t->data, t->bytes, cudaMemcpyHostToDevice,
                                 dev->stream),
                 t->name);
        return STILL_OK;
    }
    const size_t row = t->bytes / (size_t)w->N;
    int step = row * STI_CUDA_TILE > SLAB
                   ? STI_CUDA_TILE
                   : (int)(SLAB / row / STI_CUDA_TILE) * STI_CUDA_TILE;
    if (step > m.N) step = m.N;
    void *scratch;
    STI_TRY(sti_cuda_scratch(dev, row * (size_t)step, &scratch, err));
    for (int r = 0; r < m.N; r += step) {
        int n = m.N - r < step ? m.N - r : step;
        STI_CUDA(cudaMemcpyAsync(scratch, (const char *)t->data + (size_t)r * row,
                                 row * (size_t)n, cudaMemcpyHostToDevice, dev->stream),
                 t->name);
        STI_TRY(sti_cuda_pack(dev, &m, t->type, scratch, row, r, n, err));
    }
    if (w->layout & COPY) STI_TRY(sti_cuda_to_half(dev, &m, (sti_half *)m.half, err));
    return STILL_OK;
}

still_status sti_cuda_weight_new(sti_dev *dev, const sti_tensor *t, sti_weight *w,
                                 still_error *err)
{
    *w = (sti_weight){0};
    STI_TRY(check(t, sti_dtype_find((int)t->type), err));
    sti_weight v = {.src = t,
                    .N = t->dim[0],
                    .K = t->dim[1],
                    .type = t->type,
                    .layout = choose_layout(dev, t)};
    /* Training's matrices are there already, and change: they are read where they are.
     */
    if (t->type == STI_F32 && sti_cuda_on_device(t->data)) {
        v.data = t->data;
        *w = v;
        return STILL_OK;
    }
    still_status st =
        sti_cuda_mem_new(dev, parts_of(v.N, v.K, v.layout).total, &v.own, err);
    if (st == STILL_OK) st = upload(dev, t, &v, err);
    if (st == STILL_OK)
        st = sti_cuda_check(cudaStreamSynchronize(dev->stream), t->name, err);
    if (st != STILL_OK) {
        sti_cuda_mem_free(dev, &v.own);
        return sti_fail_prefix(err, st, "%s: tensor '%s'", t->path, t->name);
    }
    const sti_cuda_matrix m = sti_cuda_matrix_of(&v);
    const size_t half = sti_cuda_half_bytes(&m);
    if (half > dev->half_scratch) dev->half_scratch = half;
    dev->copies += copy_bytes(v.N, v.K, v.layout);
    sti_map_drop(t->data, t->bytes);
    *w = v;
    return STILL_OK;
}

void sti_cuda_weight_free(sti_dev *dev, sti_weight *w)
{
    if (!w) return;
    sti_cuda_bf16_forget(dev, w->own.p);
    if (w->own.p) dev->copies -= copy_bytes(w->N, w->K, w->layout);
    sti_cuda_mem_free(dev, &w->own);
    *w = (sti_weight){0};
}
