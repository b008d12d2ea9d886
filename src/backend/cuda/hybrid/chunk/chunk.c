/* chunk.c - the chunk-parallel form of the hybrid operator: which settings it
 * takes, its scratch, and the order of its kernels (chunk.h).
 *
 * A long call is cut into pieces (piece_of), many short ones make groups
 * (group_of), so that scratch is bounded and what one kernel leaves for the next is
 * still in the second-level cache. The carried state makes pieces invisible in the
 * result. */
#include "backend/cuda/hybrid/chunk/chunk.h"
#include "backend/cuda/hybrid/score.h"

enum {
    SLOT_PIECES = 7,       /* see sti_cuda_table */
    SLACK = 4096,          /* more than alignment can add to the scratch of a piece */
    LISTS_MOST = 128 << 20 /* bytes for the salient lists of a piece's chunks */
};

/* Not here: caches without a cap, keys in float, shapes that do not fill tiles, and
 * quantized keys that become far where features have positions, which no method has.
 * Without a window, scaling and positions have to be the plain ones. */
bool sti_cuda_hybrid_chunk_supported(const sti_cuda_hybrid_params *h)
{
    const bool head = h->half_kv && h->F == h->D && (h->D == 64 || h->D == 128);
    const int most =
        h->select > 0 && h->cap > 0 ? STI_CHUNK_MAX_SCORED : STI_CHUNK_MAX_C;
    if (!h->has_window)
        return head && h->has_linear && h->la_scale == STI_SCALE_EXACT &&
               !h->raw_features && h->position_cap == 0;
    return head && h->map == STI_MAP_SOFTMAX && h->C % 16 == 0 && h->C >= 16 &&
           h->C <= most && h->cap >= 0 && h->cap <= STI_CHUNK_MAX_CAP &&
           h->select >= 0 && h->select <= h->C &&
           !(h->key_bits > 0 && h->position_cap > 0 && h->has_linear &&
             !h->raw_features);
}

/* Tokens taken at once: the more selection heads, the fewer, since each has states;
 * without a window there are features of each token too, with one a list for each
 * chunk. */
static int piece_of(const sti_cuda_hybrid_params *h, int T)
{
    int most = STI_CHUNK_PIECE / (h->S / h->G) / (h->has_window ? 1 : 4);
    if (h->has_window && h->cap > 0) {
        const size_t list = 2 * (size_t)h->S * (size_t)h->cap * sizeof(int32_t);
        const size_t chunks = LISTS_MOST / list;
        if (chunks < (size_t)(most / h->C))
            most = chunks > 1 ? (int)chunks * h->C : h->C;
    }
    return T < most ? T : most;
}

/* The parts of a piece that depend on neither session nor length. */
static sti_chunk_piece empty_piece(const sti_cuda_hybrid_params *h)
{
    const bool keeps = h->has_window && h->select > 0 && h->cap > 0;
    return (sti_chunk_piece){.h = *h,
                             .raw = h->raw_features || h->position_cap > 0,
                             .select = keeps ? h->select : 0,
                             .capacity = keeps ? h->cap : 0,
                             .quantized = keeps && sti_cuda_hybrid_quantized(h),
                             .turned = keeps && h->key_bits > 0 && h->position_cap > 0};
}

/* ---- Scratch ------------------------------------------------------------- */

/* Both lay scratch out in s, and count if it has no base. Maps belong to the whole
 * call; the rest to a piece of at most T tokens. */
static void carve_maps(sti_carve *s, sti_chunk_piece *c)
{
    const sti_cuda_hybrid_params *h = &c->h;
    const size_t map = h->has_linear ? (size_t)h->D * (size_t)h->D : 0;
    c->map_q = sti_carve_take(s, (size_t)h->H * map, sizeof *c->map_q);
    c->map_k = sti_carve_take(s, (size_t)h->S * map, sizeof *c->map_k);
    c->cap_rope =
        sti_carve_take(s, h->position_cap > 0 ? (size_t)h->D : 0, sizeof *c->cap_rope);
}

static void carve_folded(sti_carve *s, sti_chunk_piece *c, int T)
{
    const sti_cuda_hybrid_params *h = &c->h;
    const size_t S = (size_t)h->S, D = (size_t)h->D, P = (size_t)h->P, t = (size_t)T;
    const size_t chunks = (t + STI_CHUNK_FOLDED - 1) / STI_CHUNK_FOLDED;
    c->phi_q = sti_carve_take(s, t * (size_t)h->H * P, sizeof *c->phi_q);
    c->phi_k = sti_carve_take(s, t * S * P, sizeof *c->phi_k);
    c->ds = sti_carve_take(s, chunks * S * P * D, sizeof *c->ds);
    c->dz = sti_carve_take(s, chunks * S * P, sizeof *c->dz);
}

static void carve_piece(sti_carve *s, sti_chunk_piece *c, int T)
{
    if (!c->h.has_window) {
        carve_folded(s, c, T);
        return;
    }
    const sti_cuda_hybrid_params *h = &c->h;
    const size_t S = (size_t)h->S, D = (size_t)h->D, P = (size_t)h->P, C = (size_t)h->C;
    const size_t retired = ((size_t)T + C - 1) / C, chunks = retired + 1;
    const size_t states = h->has_linear ? S * P : 0;
    const size_t listed = h->position_cap > 0 ? (size_t)c->capacity : 0;
    /* From base on: two chunks before the first token's at most, and its own part. */
    const int tokens = T + 2 * h->C;
    c->stored = c->quantized ? tokens : 0;
    c->rows = c->capacity + tokens + c->stored;
    const size_t slots = S * (size_t)c->capacity;
    if (h->key_bits > 0) c->list_k = sti_salient_carve(s, h->key_bits, slots, h->D);
    if (h->value_bits > 0) c->list_v = sti_salient_carve(s, h->value_bits, slots, h->D);
    c->k = sti_carve_take(s, S * (size_t)c->rows * D, sizeof *c->k);
    c->v = sti_carve_take(s, S * (size_t)c->rows * D, sizeof *c->v);
    c->k_raw =
        sti_carve_take(s, c->raw ? S * (size_t)c->rows * D : 0, sizeof *c->k_raw);
    c->k_far = c->k_raw;
    if (c->turned)
        c->k_far = sti_carve_take(s, S * (size_t)c->rows * D, sizeof *c->k_far);
    c->fold_k = h->raw_features ? c->k_raw : c->k;
    c->score = sti_carve_take(s, S * (size_t)c->rows, sizeof *c->score);
    c->norm = sti_carve_take(s,
                             c->select > 0 && sti_score_from(h->score, STI_FROM_QUERIES)
                                 ? (size_t)h->H * (size_t)T
                                 : 0,
                             sizeof *c->norm);
    c->count = sti_carve_take(s, S, sizeof *c->count);
    c->folded = sti_carve_take(s, S, sizeof *c->folded);
    c->candidate =
        sti_carve_take(s, retired * S * (size_t)c->select, sizeof *c->candidate);
    c->list_order = sti_carve_take(s, slots, sizeof *c->list_order);
    c->salient =
        sti_carve_take(s, retired * S * (size_t)c->capacity, sizeof *c->salient);
    c->fold = sti_carve_take(s, retired * S * C, sizeof *c->fold);
    c->position = sti_carve_take(s, S * listed, sizeof *c->position);
    c->order = sti_carve_take(s, chunks * S * listed, sizeof *c->order);
    c->near = sti_carve_take(s, h->position_cap > 0 ? chunks * S : 0, sizeof *c->near);
    c->ds = sti_carve_take(s, retired * states * D, sizeof *c->ds);
    c->dz = sti_carve_take(s, retired * states, sizeof *c->dz);
    c->mean = sti_carve_take(s, chunks * states * D, sizeof *c->mean);
    c->z = sti_carve_take(s, chunks * states, sizeof *c->z);
}

static size_t maps_bytes(const sti_cuda_hybrid_params *h)
{
    sti_chunk_piece c = empty_piece(h);
    sti_carve s = {0};
    carve_maps(&s, &c);
    return sti_cuda_round_up(s.used, 256);
}

static size_t piece_bytes(const sti_cuda_hybrid_params *h, int T)
{
    sti_chunk_piece c = empty_piece(h);
    sti_carve s = {0};
    carve_piece(&s, &c, T);
    return sti_cuda_round_up(s.used, 256);
}

/* All T rows may be one session's, or those of many: then each has what a piece of one
 * token has, and together they have no more of what grows with tokens than the one.
 * Rows of more than a piece are as many as a group can take. */
size_t sti_cuda_hybrid_chunk_scratch(const sti_cuda_hybrid_params *h, int T)
{
    const size_t most = (size_t)(T < STI_CHUNK_SESSIONS ? T : STI_CHUNK_SESSIONS);
    const size_t one = maps_bytes(h) + piece_bytes(h, piece_of(h, T));
    size_t many = one + most * (piece_bytes(h, 1) + SLACK);
    if (many > STI_CHUNK_SCRATCH || piece_of(h, T) < T) many = STI_CHUNK_SCRATCH;
    return one > many ? one : many;
}

/* ---- Pieces and groups --------------------------------------------------- */

/* Where chunks begin and retire in T tokens from pos on. */
static void lay_out(sti_chunk_piece *c, int pos, int T)
{
    c->pos = pos;
    c->T = T;
    if (!c->h.has_window) { /* chunks begin with the piece */
        c->n_chunks = (T + STI_CHUNK_FOLDED - 1) / STI_CHUNK_FOLDED;
        return;
    }
    const int C = c->h.C, last = (pos + T - 1) / C; /* chunk of the last token */
    const int before = pos > 0 ? (pos - 1) / C - 1 : 0;
    const int begins = (pos + C - 1) / C; /* first chunk to begin in the piece */
    c->base = before > 0 ? before * C : 0;
    c->first_chunk = pos / C;
    c->n_chunks = last - c->first_chunk + 1;
    c->first_retire = begins > 2 ? begins : 2;
    c->n_retired = last >= c->first_retire ? last - c->first_retire + 1 : 0;
}

/* STILL Alg. 1, step by step. */
static still_status run_kernels(const sti_chunk_group *g, still_error *err)
{
    if (!g->c->h.has_window) return sti_chunk_no_window(g, err);
    STI_TRY(sti_chunk_pack(g, err));
    STI_TRY(sti_chunk_score(g, err));
    STI_TRY(sti_chunk_select(g, err));
    STI_TRY(sti_chunk_state(g, err));
    STI_TRY(sti_chunk_output(g, err));
    return sti_chunk_tail(g, err);
}

/* Tokens [done, done + n) of the session as a piece. */
static void take_piece(sti_chunk_piece *c, const sti_cuda_hybrid_session *session,
                       int64_t pos, int done, int n)
{
    const size_t at = (size_t)done;
    const size_t q_row = (size_t)c->h.H * (size_t)c->h.D,
                 k_row = (size_t)c->h.G * (size_t)c->h.D;
    c->s = *session;
    c->s.q += at * q_row;
    c->s.k += at * k_row;
    c->s.v += at * k_row;
    c->s.y += at * q_row;
    if (c->s.gate) c->s.gate += at * q_row;
    if (c->s.q_raw) c->s.q_raw += at * q_row;
    lay_out(c, (int)pos + done, n);
}

/* A session on its own, piece after piece. c: maps are carved. */
static still_status run_one(sti_dev *dev, sti_chunk_piece c,
                            const sti_cuda_hybrid_session *session, int64_t pos,
                            void *scratch, still_error *err)
{
    const sti_chunk_group g = {.stream = dev->stream, .c = &c, .n = 1};
    sti_carve s = {.base = scratch};
    carve_piece(&s, &c, piece_of(&c.h, session->T));
    for (int done = 0; done < session->T; done += c.T) {
        take_piece(&c, session, pos, done, piece_of(&c.h, session->T - done));
        STI_TRY(run_kernels(&g, err));
        c.first = false;
    }
    return STILL_OK;
}

/* n sessions of one piece each. */
static still_status run_group(sti_dev *dev, sti_chunk_piece common,
                              const sti_cuda_hybrid_session *session,
                              const int64_t *pos, int n, unsigned char *scratch,
                              still_error *err)
{
    sti_chunk_piece c[STI_CHUNK_SESSIONS];
    for (int i = 0; i < n; i++) {
        sti_carve s = {.base = scratch};
        c[i] = common;
        carve_piece(&s, &c[i], session[i].T);
        take_piece(&c[i], &session[i], pos[i], 0, session[i].T);
        scratch += piece_bytes(&common.h, session[i].T);
    }
    const void *table;
    STI_TRY(sti_cuda_table(dev, SLOT_PIECES, c, (size_t)n * sizeof *c, &table, err));
    const sti_chunk_group g = {.stream = dev->stream, .c = c, .table = table, .n = n};
    return run_kernels(&g, err);
}

/* How many of n sessions go together: one that is longer than a piece goes alone. */
static int group_of(const sti_cuda_hybrid_params *h,
                    const sti_cuda_hybrid_session *session, int n)
{
    size_t used = maps_bytes(h);
    int i = 0;
    for (; i < n && i < STI_CHUNK_SESSIONS; i++) {
        if (piece_of(h, session[i].T) < session[i].T) break;
        used += piece_bytes(h, session[i].T);
        if (used > STI_CHUNK_SCRATCH) break;
    }
    return i > 1 ? i : 1;
}

static still_status check(const sti_cuda_hybrid_params *h,
                          const sti_cuda_hybrid_session *session, int64_t pos,
                          still_error *err)
{
    if (!sti_cuda_hybrid_chunk_supported(h) ||
        session->capacity != empty_piece(h).capacity)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "cuda hybrid attention: settings that only run token by token "
                        "(chunk %d, head size %d, cap %d, list of %d)",
                        h->C, h->D, h->cap, session->capacity);
    if (empty_piece(h).raw && (!session->q_raw || !h->inv_freq))
        return sti_fail(err, STILL_E_ARG,
                        "cuda hybrid attention: capped positions or features without "
                        "them, but no queries before RoPE");
    if (pos < 0 || session->T <= 0 ||
        pos > INT32_MAX - 2 * STI_CHUNK_MAX_C - session->T)
        return sti_fail(
            err, STILL_E_LIMIT,
            "cuda hybrid attention: %d tokens from position %lld, positions "
            "end at %d",
            session->T, (long long)pos, INT32_MAX);
    return STILL_OK;
}

still_status sti_cuda_hybrid_chunk_run(sti_dev *dev, const sti_cuda_hybrid_params *h,
                                       const sti_cuda_hybrid_session *session,
                                       const int64_t *pos, int n, still_error *err)
{
    int64_t rows = 0;
    for (int i = 0; i < n; i++) {
        STI_TRY(check(h, &session[i], pos[i], err));
        rows += session[i].T;
    }
    void *scratch;
    const int all = rows < INT32_MAX ? (int)rows : INT32_MAX;
    STI_TRY(
        sti_cuda_scratch(dev, sti_cuda_hybrid_chunk_scratch(h, all), &scratch, err));
    sti_chunk_piece c = empty_piece(h);
    sti_carve s = {.base = scratch};
    carve_maps(&s, &c);
    c.major = dev->major;
    c.sms = dev->sms;
    c.first = true;
    unsigned char *rest = (unsigned char *)scratch + maps_bytes(h);
    for (int i = 0, k; i < n; i += k) {
        k = group_of(h, session + i, n - i);
        STI_TRY(k == 1 ? run_one(dev, c, &session[i], pos[i], rest, err)
                       : run_group(dev, c, session + i, pos + i, k, rest, err));
        c.first = false;
    }
    return STILL_OK;
}
