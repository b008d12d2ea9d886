/* graph.c - passes over the layers: ids and positions on the device, answers back, and
 * passes captured as CUDA graphs.
 *
 * A decode step queues hundreds of small kernels of a microsecond or two each: less
 * than it takes to launch one. Passes in which every sequence has one row are therefore
 * captured. The first of a key runs as it is and leaves its tables on the device; the
 * second is captured while it runs; later ones are replayed, after their ids and
 * positions have been copied to where the captured kernels read them. Sequences that
 * begin a chunk do more work than others, so a key has two captures, with and without.
 *
 * Kernels may depend on positions only by reading them on the device. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/dense/kernels.h"

enum { CAPTURES = 8, MOST_ROWS = 512, SLOTS = 16 };

typedef struct table {
    sti_block device;
    void *host; /* what is there */
    size_t bytes, capacity;
} table;

typedef struct tables {
    table *at;
    int n, capacity;
} tables;

typedef struct capture {
    uint64_t *key; /* [n_key]; NULL: free */
    int n_key, M;
    bool retires; /* some sequence begins a chunk */
    bool tried;   /* it has run once as it is */
    uint64_t used;
    tables own;
    cudaGraphExec_t graph; /* NULL: not captured */
} capture;

struct sti_cuda_graphs {
    capture capture[CAPTURES];
    tables other; /* of passes that are not captured */
    table slot[SLOTS];
    table ids;     /* tok, then pos */
    size_t pos_at; /* of ids, in numbers */
    void *answers; /* the program's memory, which kernels can write to */
    size_t answers_bytes;
    uint64_t clock;
    /* The running pass. */
    bool running, capturing;
    const int32_t *tok, *pos; /* as the program has them */
    int M;
    capture *now; /* NULL: one that is not captured */
    int next_table;
};

/* ---- Tables -------------------------------------------------------------- */

static void free_table(sti_dev *dev, table *t)
{
    sti_cuda_mem_free(dev, &t->device);
    free(t->host);
    *t = (table){0};
}

static void free_tables(sti_dev *dev, tables *t)
{
    for (int i = 0; i < t->n; i++) free_table(dev, &t->at[i]);
    free(t->at);
    *t = (tables){0};
}

static still_status reserve_table(sti_dev *dev, table *t, size_t bytes,
                                  still_error *err)
{
    if (bytes <= t->capacity) return STILL_OK;
    size_t capacity = bytes + bytes / 2 + 256;
    table grown = {.capacity = capacity, .host = sti_alloc(capacity, 1)};
    if (!grown.host) return sti_fail_memory(err, "cuda table", capacity);
    still_status st = sti_cuda_mem_new(dev, capacity, &grown.device, err);
    if (st != STILL_OK) {
        free(grown.host);
        return st;
    }
    free_table(dev, t);
    *t = grown;
    return STILL_OK;
}

/* The bytes on the device become the host's. The copy is made from memory that stays as
 * it is until the next one, so it need not be waited for. */
static still_status fill_table(sti_dev *dev, table *t, const void *host, size_t bytes,
                               still_error *err)
{
    if (bytes == t->bytes && memcmp(t->host, host, bytes) == 0) return STILL_OK;
    if (sti_cuda_capturing(dev))
        return sti_fail(err, STILL_E_IO,
                        "cuda: a captured pass differs from the one before it");
    STI_TRY(reserve_table(dev, t, bytes, err));
    memcpy(t->host, host, bytes);
    t->bytes = 0; /* nobody knows what is there if the copy fails */
    STI_CUDA(cudaMemcpyAsync(t->device.p, t->host, bytes, cudaMemcpyHostToDevice,
                             dev->stream),
             "copying a table");
    t->bytes = bytes;
    return STILL_OK;
}

static still_status next_table(struct sti_cuda_graphs *p, table **out, still_error *err)
{
    tables *all = p->now ? &p->now->own : &p->other;
    if (p->next_table == all->n) {
        if (all->n == all->capacity) {
            const int capacity = all->capacity * 2 + 64;
            table *grown = sti_grow(all->at, (size_t)capacity, sizeof *grown);
            if (!grown) return sti_fail_memory(err, "cuda tables", (size_t)capacity);
            memset(grown + all->capacity, 0,
                   (size_t)(capacity - all->capacity) * sizeof *grown);
            all->at = grown;
            all->capacity = capacity;
        }
        all->n++;
    }
    *out = &all->at[p->next_table++];
    return STILL_OK;
}

still_status sti_cuda_table(sti_dev *dev, int slot, const void *host, size_t bytes,
                            const void **out, still_error *err)
{
    struct sti_cuda_graphs *p = dev->graphs;
    table *t = &p->slot[slot % SLOTS];
    if (p->running) STI_TRY(next_table(p, &t, err));
    STI_TRY(fill_table(dev, t, host, bytes, err));
    *out = t->device.p;
    return STILL_OK;
}

still_status sti_cuda_ids(sti_dev *dev, const int32_t *host, int n, const int32_t **out,
                          still_error *err)
{
    struct sti_cuda_graphs *p = dev->graphs;
    if (p->running && host >= p->tok && host + n <= p->tok + p->M) {
        *out = (const int32_t *)p->ids.device.p + (host - p->tok);
        return STILL_OK;
    }
    if (p->running && host >= p->pos && host + n <= p->pos + p->M) {
        *out = sti_cuda_pass_positions(dev) + (host - p->pos);
        return STILL_OK;
    }
    const void *at;
    STI_TRY(sti_cuda_table(dev, SLOTS - 1, host, (size_t)n * sizeof *host, &at, err));
    *out = at;
    return STILL_OK;
}

const int32_t *sti_cuda_pass_positions(const sti_dev *dev)
{
    const struct sti_cuda_graphs *p = dev->graphs;
    return p->running ? (const int32_t *)p->ids.device.p + p->pos_at : NULL;
}

bool sti_cuda_capturing(const sti_dev *dev)
{
    return dev->graphs && dev->graphs->capturing;
}

/* ---- Records ------------------------------------------------------------- */

static void free_capture(sti_dev *dev, capture *r)
{
    if (r->graph) {
        (void)cudaStreamSynchronize(dev->stream);
        (void)cudaGraphExecDestroy(r->graph);
    }
    free_tables(dev, &r->own);
    free(r->key);
    *r = (capture){0};
}

void sti_cuda_graphs_forget(sti_dev *dev)
{
    for (int i = 0; dev->graphs && i < CAPTURES; i++) {
        capture *r = &dev->graphs->capture[i];
        if (!r->graph) continue;
        (void)cudaStreamSynchronize(dev->stream);
        (void)cudaGraphExecDestroy(r->graph);
        r->graph = NULL;
    }
}

static bool begins_chunk(const sti_pass *p)
{
    for (int i = 0; p->chunk > 0 && i < p->M; i++)
        if (p->pos[i] % p->chunk == 0) return true;
    return false;
}

static bool is_of(const capture *r, const sti_pass *p, bool retires)
{
    return r->key && r->M == p->M && r->n_key == p->n_key && r->retires == retires &&
           memcmp(r->key, p->key, (size_t)p->n_key * sizeof *r->key) == 0;
}

/* The capture of this pass: its own, or the one that was used longest ago, emptied. That
 * keeps its tables, which are filled anew: where sessions come and go, every pass has
 * other ones, and to make its tables would take longer than to compute it. */
static still_status find_capture(sti_dev *dev, const sti_pass *p, capture **out,
                                 still_error *err)
{
    struct sti_cuda_graphs *all = dev->graphs;
    const bool retires = begins_chunk(p);
    capture *oldest = &all->capture[0];
    for (int i = 0; i < CAPTURES; i++) {
        capture *r = &all->capture[i];
        if (is_of(r, p, retires)) {
            *out = r;
            return STILL_OK;
        }
        if (r->used < oldest->used) oldest = r;
    }
    const tables own = oldest->own;
    oldest->own = (tables){0};
    free_capture(dev, oldest);
    const size_t bytes = (size_t)p->n_key * sizeof *oldest->key;
    *oldest = (capture){.key = sti_alloc(1, bytes),
                        .n_key = p->n_key,
                        .M = p->M,
                        .retires = retires,
                        .own = own};
    if (!oldest->key) return sti_fail_memory(err, "cuda pass", bytes);
    memcpy(oldest->key, p->key, bytes);
    *out = oldest;
    return STILL_OK;
}

/* Ids and positions in one copy. Where they lie must not change under a capturing: that
 * depends on M only. */
static still_status copy_ids(sti_dev *dev, const sti_pass *p, still_error *err)
{
    struct sti_cuda_graphs *all = dev->graphs;
    table *t = &all->ids;
    const size_t n = (size_t)p->M, pos_at = sti_cuda_round_up(n, 4),
                 bytes = (pos_at + n) * sizeof(int32_t);
    if (bytes > t->capacity) sti_cuda_graphs_forget(dev);
    STI_TRY(reserve_table(dev, t, bytes, err));
    memcpy(t->host, p->tok, n * sizeof(int32_t));
    memcpy((int32_t *)t->host + pos_at, p->pos, n * sizeof(int32_t));
    STI_CUDA(cudaMemcpyAsync(t->device.p, t->host, bytes, cudaMemcpyHostToDevice,
                             dev->stream),
             "copying ids and positions");
    all->pos_at = pos_at;
    return STILL_OK;
}

/* ---- Passes -------------------------------------------------------------- */

still_status sti_cuda_pass_begin(sti_dev *dev, const sti_pass *p, bool *done,
                                 still_error *err)
{
    struct sti_cuda_graphs *all = dev->graphs;
    *done = false;
    capture *r = NULL;
    STI_TRY(copy_ids(dev, p, err));
    if (p->one_each && p->M <= MOST_ROWS) STI_TRY(find_capture(dev, p, &r, err));
    if (r) r->used = ++all->clock;
    if (r && r->graph) {
        STI_CUDA(cudaGraphLaunch(r->graph, dev->stream), "replaying a pass");
        *done = true;
        return STILL_OK;
    }
    if (r && r->tried) {
        STI_CUDA(cudaStreamBeginCapture(dev->stream, cudaStreamCaptureModeThreadLocal),
                 "capturing a pass");
        all->capturing = true;
    }
    all->running = true;
    all->tok = p->tok;
    all->pos = p->pos;
    all->M = p->M;
    all->now = r;
    all->next_table = 0;
    return STILL_OK;
}

still_status sti_cuda_pass_end(sti_dev *dev, bool whole, still_error *err)
{
    struct sti_cuda_graphs *all = dev->graphs;
    if (!all->running) return STILL_OK;
    capture *r = all->now;
    const bool captured = all->capturing;
    all->running = all->capturing = false;
    all->now = NULL;
    if (r) r->tried = whole;
    if (!captured) return STILL_OK;
    cudaGraph_t graph = NULL;
    const cudaError_t ended = cudaStreamEndCapture(dev->stream, &graph);
    if (!whole) {
        (void)cudaGetLastError();
        if (ended == cudaSuccess && graph) (void)cudaGraphDestroy(graph);
        return STILL_OK;
    }
    STI_CUDA(ended, "ending a capturing");
    cudaError_t e = cudaGraphInstantiate(&r->graph, graph, 0);
    (void)cudaGraphDestroy(graph);
    if (e != cudaSuccess) r->graph = NULL;
    STI_CUDA(e, "making a graph of a captured pass");
    STI_CUDA(cudaGraphLaunch(r->graph, dev->stream), "running a captured pass");
    return STILL_OK;
}

still_status sti_cuda_answers(sti_dev *dev, size_t bytes, void **out, still_error *err)
{
    struct sti_cuda_graphs *all = dev->graphs;
    if (bytes > all->answers_bytes) {
        void *grown = NULL;
        STI_CUDA(cudaHostAlloc(&grown, bytes, cudaHostAllocMapped),
                 "allocating memory of the program for answers");
        if (all->answers) (void)cudaFreeHost(all->answers);
        all->answers = grown;
        all->answers_bytes = bytes;
    }
    *out = all->answers;
    return STILL_OK;
}

still_status sti_cuda_graphs_new(sti_dev *dev, still_error *err)
{
    dev->graphs = sti_alloc(1, sizeof *dev->graphs);
    if (!dev->graphs) return sti_fail_memory(err, "cuda passes", sizeof *dev->graphs);
    return STILL_OK;
}

void sti_cuda_graphs_free(sti_dev *dev)
{
    struct sti_cuda_graphs *all = dev->graphs;
    if (!all) return;
    for (int i = 0; i < CAPTURES; i++) free_capture(dev, &all->capture[i]);
    free_tables(dev, &all->other);
    for (int i = 0; i < SLOTS; i++) free_table(dev, &all->slot[i]);
    free_table(dev, &all->ids);
    if (all->answers) (void)cudaFreeHost(all->answers);
    free(all);
    dev->graphs = NULL;
}
