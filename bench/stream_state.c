/* stream_state.c - whether the linear state drifts over a long stream: feeds a book to
 * a model with the method `still` and, in parallel, sums the state of one layer in
 * double.
 *
 *     stream_state MODEL TEXT [--tokens N] [--layer L] [--threads T]
 *
 * Layer L does not depend on the layers above it, so those are skipped: with L = 0 a
 * million tokens take minutes. Tokens come a chunk at a time and the layer is the last
 * one that runs, so its keys and values are in the activations after each call. Which
 * tokens were folded follows from positions alone: those of the retiring chunk and of
 * the salient list before, less those of the list after. Each adds
 *     s += phi(k) v^T,  z += phi(k),  phi(k) = [softmax(k), softmax(-k)]
 * in double, with RoPE undone on k (capped positions).
 *
 * Prints a JSON object at every tenth of the stream: |s - s64| / |s64| and the same
 * for z, the largest of all heads. Status 1 if one is above 1e-5, or if a token was
 * lost. / */
#include <inttypes.h>
#include <math.h>

#include "bench.h"
#include "session/session.h"

enum { TENTHS = 10 };
static const double tolerated = 1e-5;

typedef struct token {
    int32_t position;
    float *k, *v; /* [D]: after RoPE */
} token;

/* One selection head. Its tokens: those on the salient list, then the chunk that
 * leaves; both lie in `rows`, and `list` says in what order. */
typedef struct head {
    token *list; /* [cap + C] */
    int salient; /* the first ones */
    int64_t folded;
    double *s, *z; /* [P,D], [P] */
} head;

typedef struct follower {
    const sti_hybrid_settings *set;
    const float *inv_freq; /* [D/2] */
    bool interleaved;
    int S, D, P;
    head *head;     /* [S] */
    float *k, *v;   /* [3, C, S, D]: the last three chunks, chunk c at c % 3 */
    float *rows;    /* keys and values of all heads' tokens */
    uint8_t *stays; /* [tokens]: marks of one head, all 0 in between */
    sti_block memory;
} follower;

/* ---- Following ----------------------------------------------------------- */

static void carve(follower *f, sti_carve *c, size_t tokens)
{
    const size_t S = (size_t)f->S, D = (size_t)f->D, P = (size_t)f->P;
    const size_t chunk = (size_t)f->set->chunk, cap = (size_t)f->set->cap;
    const size_t capacity = cap + chunk;
    f->head = sti_carve_take(c, S, sizeof *f->head);
    f->k = sti_carve_take(c, 3 * chunk * S * D, sizeof *f->k);
    f->v = sti_carve_take(c, 3 * chunk * S * D, sizeof *f->v);
    f->rows = sti_carve_take(c, S * capacity * 2 * D, sizeof *f->rows);
    f->stays = sti_carve_take(c, tokens, sizeof *f->stays);
    for (size_t i = 0; i < S; i++) {
        head h = {.list = sti_carve_take(c, capacity, sizeof *h.list),
                  .s = sti_carve_take(c, P * D, sizeof *h.s),
                  .z = sti_carve_take(c, P, sizeof *h.z)};
        if (!c->base) continue;
        for (size_t j = 0; j < capacity; j++) {
            float *row = f->rows + (i * capacity + j) * 2 * D;
            h.list[j] = (token){.k = row, .v = row + D};
        }
        f->head[i] = h;
    }
}

static still_status follower_new(follower *f, const still_session *s,
                                 const sti_attn_layer *layer, still_error *err)
{
    const sti_hybrid_settings *set = &s->cfg.hybrid;
    const sti_hybrid_shape shape = {layer->heads, layer->kv_heads, layer->head_dim,
                                    layer->head_dim};
    *f = (follower){.set = set,
                    .inv_freq = layer->inv_freq,
                    .interleaved = layer->interleaved,
                    .S = sti_hybrid_selection_heads(set, &shape),
                    .D = shape.D,
                    .P = sti_hybrid_features(set, &shape)};
    sti_carve c = {0};
    carve(f, &c, (size_t)s->cfg.ctx);
    if (!sti_block_new(&f->memory, c.used))
        return sti_fail_memory(err, "sums in double", c.used);
    c = (sti_carve){.base = f->memory.p};
    carve(f, &c, (size_t)s->cfg.ctx);
    return STILL_OK;
}

static void softmax(const double *x, double sign, int n, double *p)
{
    double most = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++) most = fmax(most, sign * x[i]);
    for (int i = 0; i < n; i++) sum += p[i] = exp(sign * x[i] - most);
    for (int i = 0; i < n; i++) p[i] /= sum;
}

static void fold(const follower *f, head *h, const token *t)
{
    const int D = f->D, half = D / 2;
    double x[STI_HEAD_DIM_MAX] = {0}, phi[2 * STI_HEAD_DIM_MAX] = {0};
    for (int i = 0; i < half; i++) {
        const double angle = -(double)t->position * (double)f->inv_freq[i];
        const int a = f->interleaved ? 2 * i : i, b = f->interleaved ? a + 1 : a + half;
        x[a] = t->k[a] * cos(angle) - t->k[b] * sin(angle);
        x[b] = t->k[b] * cos(angle) + t->k[a] * sin(angle);
    }
    softmax(x, 1, D, phi);
    softmax(x, -1, D, phi + D);
    for (int p = 0; p < f->P; p++) {
        double *s = h->s + (size_t)p * (size_t)D;
        h->z[p] += phi[p];
        for (int d = 0; d < D; d++) s[d] += phi[p] * (double)t->v[d];
    }
    h->folded++;
}

/* Takes the tokens of chunk c onto the end of the list of head `sel`. */
static void join(const follower *f, int sel, int64_t c)
{
    const int C = f->set->chunk;
    const size_t D = (size_t)f->D, bytes = D * sizeof(float);
    head *h = &f->head[sel];
    for (int i = 0; i < C; i++) {
        const size_t row = (size_t)(c % 3 * C + i) * (size_t)f->S + (size_t)sel;
        token *t = &h->list[h->salient + i];
        t->position = (int32_t)(c * C + i);
        memcpy(t->k, f->k + row * D, bytes);
        memcpy(t->v, f->v + row * D, bytes);
    }
}

/* Chunk c has left: folds what is no longer salient, keeps the rest in front. false:
 * the session holds tokens that were folded before, or has folded another number. */
static bool leave(const follower *f, int sel, int64_t c, const sti_hybrid_state *st)
{
    head *h = &f->head[sel];
    const int32_t *position = st->sal_pos + (size_t)sel * (size_t)st->sal_capacity;
    const int count = st->sal_count[sel], before = h->salient + f->set->chunk;
    join(f, sel, c);
    for (int i = 0; i < count; i++) f->stays[position[i]] = 1;
    h->salient = 0;
    for (int i = 0; i < before; i++) {
        const token t = h->list[i];
        if (!f->stays[t.position]) {
            fold(f, h, &t);
            continue;
        }
        h->list[i] = h->list[h->salient]; /* trade places: rows are not copied */
        h->list[h->salient++] = t;
    }
    for (int i = 0; i < count; i++) f->stays[position[i]] = 0;
    return h->salient == count && h->folded == st->folded[sel];
}

/* Chunk c has been fed: its keys and values are in the activations. */
static still_status follow(const follower *f, const sti_scratch *x, int64_t c,
                           const sti_hybrid_state *st, still_error *err)
{
    const size_t chunk = (size_t)f->set->chunk * (size_t)f->S * (size_t)f->D;
    memcpy(f->k + (size_t)(c % 3) * chunk, x->k, chunk * sizeof *f->k);
    memcpy(f->v + (size_t)(c % 3) * chunk, x->v, chunk * sizeof *f->v);
    for (int s = 0; c >= 2 && s < f->S; s++)
        if (!leave(f, s, c - 2, st))
            return sti_fail(err, STILL_E_FORMAT,
                            "chunk %lld, head %d: %d salient and %lld folded tokens, "
                            "expected %d and %lld",
                            (long long)c, s, st->sal_count[s], (long long)st->folded[s],
                            f->head[s].salient, (long long)f->head[s].folded);
    return STILL_OK;
}

/* ---- Reporting ----------------------------------------------------------- */

/* |a - b| / |b| of n numbers. */
static double distance(const float *a, const double *b, size_t n)
{
    double off = 0, all = 0;
    for (size_t i = 0; i < n; i++) {
        off += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        all += b[i] * b[i];
    }
    return all > 0 ? sqrt(off / all) : sqrt(off);
}

static bool report(const follower *f, const still_session *s, int layer, int64_t tokens)
{
    const sti_hybrid_state *st = &s->layer[layer].hybrid;
    const size_t P = (size_t)f->P, D = (size_t)f->D;
    double off_s = 0, off_z = 0;
    for (int i = 0; i < f->S; i++) {
        const size_t row = (size_t)i * P;
        const head *h = &f->head[i];
        off_s = fmax(off_s, distance((const float *)st->lin_s + row * D, h->s, P * D));
        off_z = fmax(off_z, distance((const float *)st->lin_z + row, h->z, P));
    }
    printf("{\"layer\":%d,\"tokens\":%lld,\"salient\":%d,\"folded\":%lld,"
           "\"error_s\":%.3g,\"error_z\":%.3g,"
           "\"session_bytes\":%zu,\"peak_rss_bytes\":%" PRIu64 "}\n",
           layer, (long long)tokens, st->sal_count[0], (long long)st->folded[0], off_s,
           off_z, s->memory.bytes, peak_rss());
    fflush(stdout);
    return off_s <= tolerated && off_z <= tolerated; /* NaN is not */
}

/* ---- The stream ---------------------------------------------------------- */

static still_status stream(still_session *s, int layer, const int32_t *ids, int64_t n,
                           bool *good, still_error *err)
{
    still_model *m = s->model;
    const sti_attn_layer shape = sti_model_attn_layer(m, layer);
    const int C = s->cfg.hybrid.chunk;
    const int64_t chunks = n / C;
    follower f;
    STI_TRY(follower_new(&f, s, &shape, err));
    still_status status = STILL_OK;
    *good = true;
    for (int64_t c = 0; c < chunks && !status; c++) {
        const sti_sequence q = {.n = C, .past = (int)(c * C), .memory = s->layer};
        status = sti_model_forward(m, &s->cfg, ids + c * C, &q, 1, err);
        if (!status) status = follow(&f, &m->scratch, c, &s->layer[layer].hybrid, err);
        if (!status && (c + 1) * TENTHS / chunks > c * TENTHS / chunks)
            *good = report(&f, s, layer, (c + 1) * C) && *good;
    }
    sti_block_free(&f.memory);
    return status;
}

static still_status read_ids(const still_model *m, const char *path, int32_t **ids,
                             size_t *n, still_error *err)
{
    char *text = NULL;
    size_t bytes;
    STI_TRY(still_text_read(path, &text, &bytes, err));
    const still_tokenizer *tk = still_model_tokenizer(m);
    still_status st =
        tk ? STILL_OK : sti_fail(err, STILL_E_ARG, "the model has no tokenizer");
    *ids = st ? NULL : sti_alloc(bytes + 1, sizeof **ids); /* a token has a byte */
    if (!st && !*ids) st = sti_fail_memory(err, "token ids", bytes);
    if (!st)
        st = still_tokenizer_encode(tk, text, bytes, STILL_ENCODE_BOS, *ids, bytes + 1,
                                    n, err);
    free(text);
    return st;
}

static still_status run(const char *path, const char *text, int64_t tokens, int layer,
                        int threads, bool *good, still_error *err)
{
    still_model *m = NULL;
    still_session *s = NULL;
    int32_t *ids = NULL;
    size_t n = 0;
    still_method how;
    STI_TRY(still_method_init(&how, "still", 0, err));
    how.positions = STILL_POSITIONS_CAPPED;
    STI_TRY(still_model_open(
        path, &STILL_PARAMS(still_model_params, .backend = "cpu", .threads = threads),
        &m, err));
    const int layers = m->cfg.layers;
    still_status st = read_ids(m, text, &ids, &n, err);
    if (!st && tokens == 0) tokens = (int64_t)n;
    if (!st && (layer >= layers || (size_t)tokens > n))
        st = sti_fail(err, STILL_E_ARG,
                      "layer %d of %d and %lld tokens of %zu are not there", layer,
                      layers, (long long)tokens, n);
    m->cfg.layers = layer + 1; /* the others are neither run nor remembered */
    if (!st)
        st = still_session_new(m,
                               &STILL_PARAMS(still_session_params, .ctx = (int)tokens,
                                             .cache = "f32", .batch = how.chunk,
                                             .method = &how),
                               &s, err);
    if (!st) st = stream(s, layer, ids, tokens, good, err);
    still_session_free(s);
    m->cfg.layers = layers;
    still_model_free(m);
    free(ids);
    return st;
}

static bool parse(const char *text, long most, long *out)
{
    char *end;
    *out = strtol(text, &end, 10);
    return *text && !*end && *out >= 0 && *out <= most;
}

int main(int argc, char **argv)
{
    long tokens = 0, layer = 0, threads = 0;
    bool usable = argc >= 3 && argc % 2 == 1;
    for (int i = 3; usable && i < argc; i += 2) {
        if (strcmp(argv[i], "--tokens") == 0)
            usable = parse(argv[i + 1], 1 << 30, &tokens);
        else if (strcmp(argv[i], "--layer") == 0)
            usable = parse(argv[i + 1], 1 << 16, &layer);
        else
            usable =
                strcmp(argv[i], "--threads") == 0 && parse(argv[i + 1], 1024, &threads);
    }
    if (!usable) {
        fputs("usage: stream_state MODEL TEXT [--tokens N] [--layer L] [--threads T]\n",
              stderr);
        return 2;
    }
    bool good = false;
    still_error err;
    must(run(argv[1], argv[2], tokens, (int)layer, (int)threads, &good, &err), &err);
    return good ? 0 : 1;
}
