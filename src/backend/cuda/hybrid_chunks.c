/* hybrid_chunks.c - the chunk-parallel form of the hybrid operator: which settings it
 * takes, its scratch, and the order of its kernels (hybrid_chunks.h).
 *
 * A call is cut into pieces (piece_of), so that scratch is bounded and
 * what one kernel leaves for the next is still in the second-level cache. The carried
 * state makes pieces invisible in the result. */
#include "backend/cuda/hybrid_chunks.h"

bool sti_cuda_chunks_supported(const sti_cuda_shape *h)
{
    return h->half_kv && h->has_window && !h->raw_features && h->position_cap == 0 &&
           h->map == STI_MAP_SOFTMAX && h->F == h->D && (h->D == 64 || h->D == 128) &&
           h->C % 16 == 0 && h->C >= 16 && h->C <= STI_CHUNKS_MAX_C &&
           h->score != STI_SCORE_RECEIVED && h->cap >= 0 &&
           h->cap <= STI_CHUNKS_MAX_CAP && h->select >= 0 && h->select <= h->C;
}

/* Tokens taken at once: the more selection heads, the fewer, since each has states. */
static int piece_of(const sti_cuda_shape *h, int T)
{
    const int most = STI_CHUNKS_PIECE / (h->S / h->G);
    return T < most ? T : most;
}

/* Lays the scratch of a piece of at most T tokens out; counts if s has no base. */
static void carve(sti_carve *s, sti_chunks *c, int T)
{
    const sti_cuda_shape *h = &c->h;
    const size_t S = (size_t)h->S, D = (size_t)h->D, P = (size_t)h->P, C = (size_t)h->C;
    const size_t leaves = ((size_t)T + C - 1) / C, chunks = leaves + 1;
    const size_t maps = h->has_linear ? D * D : 0, states = h->has_linear ? S * P : 0;
    /* From base on: two chunks before the first token's at most, and its own part. */
    c->rows = c->room + T + 2 * h->C;
    c->k = sti_carve_take(s, S * (size_t)c->rows * D, sizeof *c->k);
    c->v = sti_carve_take(s, S * (size_t)c->rows * D, sizeof *c->v);
    c->score = sti_carve_take(s, S * (size_t)c->rows, sizeof *c->score);
    c->map_q = sti_carve_take(s, (size_t)h->H * maps, sizeof *c->map_q);
    c->map_k = sti_carve_take(s, S * maps, sizeof *c->map_k);
    c->count = sti_carve_take(s, S, sizeof *c->count);
    c->folded = sti_carve_take(s, S, sizeof *c->folded);
    c->candidate =
        sti_carve_take(s, leaves * S * (size_t)c->select, sizeof *c->candidate);
    c->salient = sti_carve_take(s, leaves * S * (size_t)c->room, sizeof *c->salient);
    c->fold = sti_carve_take(s, leaves * S * C, sizeof *c->fold);
    c->ds = sti_carve_take(s, leaves * states * D, sizeof *c->ds);
    c->dz = sti_carve_take(s, leaves * states, sizeof *c->dz);
    c->mean = sti_carve_take(s, chunks * states * D, sizeof *c->mean);
    c->z = sti_carve_take(s, chunks * states, sizeof *c->z);
}

/* The parts of a piece that depend on neither position nor length. */
static sti_chunks describe(const sti_cuda_shape *h)
{
    const bool keeps = h->select > 0 && h->cap > 0;
    return (sti_chunks){
        .h = *h, .select = keeps ? h->select : 0, .room = keeps ? h->cap : 0};
}

size_t sti_cuda_chunks_room(const sti_cuda_shape *h, int T)
{
    sti_chunks c = describe(h);
    sti_carve s = {0};
    carve(&s, &c, piece_of(h, T));
    return s.used;
}

/* Where chunks begin and leave in T tokens from pos on. */
static void lay_out(sti_chunks *c, int pos, int T)
{
    const int C = c->h.C, last = (pos + T - 1) / C; /* chunk of the last token */
    const int before = pos > 0 ? (pos - 1) / C - 1 : 0;
    const int begins = (pos + C - 1) / C; /* first chunk to begin in the piece */
    c->pos = pos;
    c->T = T;
    c->base = before > 0 ? before * C : 0;
    c->first_chunk = pos / C;
    c->n_chunks = last - c->first_chunk + 1;
    c->first_leave = begins > 2 ? begins : 2;
    c->n_leaves = last >= c->first_leave ? last - c->first_leave + 1 : 0;
}

static still_status run_piece(cudaStream_t stream, const sti_chunks *c,
                              still_error *err)
{
    STI_TRY(sti_chunks_pack(stream, c, err));
    STI_TRY(sti_chunks_score(stream, c, err));
    STI_TRY(sti_chunks_select(stream, c, err));
    STI_TRY(sti_chunks_state(stream, c, err));
    STI_TRY(sti_chunks_output(stream, c, err));
    return sti_chunks_tail(stream, c, err);
}

still_status sti_cuda_hybrid_chunks(sti_dev *dev, const sti_cuda_shape *h,
                                    const sti_cuda_session *session, int64_t pos, int T,
                                    void *room, still_error *err)
{
    sti_chunks c = describe(h);
    if (!sti_cuda_chunks_supported(h) || session->room != c.room)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "cuda hybrid attention: settings that only run token by token "
                        "(chunk %d, head size %d, cap %d, list of %d)",
                        h->C, h->D, h->cap, session->room);
    if (pos < 0 || T < 0 || pos > INT32_MAX - 2 * STI_CHUNKS_MAX_C - T)
        return sti_fail(
            err, STILL_E_LIMIT,
            "cuda hybrid attention: %d tokens from position %lld, positions "
            "end at %d",
            T, (long long)pos, INT32_MAX);
    c.major = dev->major;
    c.sms = dev->sms;
    sti_carve s = {.base = room};
    carve(&s, &c, piece_of(h, T));
    const size_t q_row = (size_t)h->H * (size_t)h->D,
                 k_row = (size_t)h->G * (size_t)h->D;
    for (int done = 0; done < T; done += c.T) {
        const int n = piece_of(h, T - done);
        const size_t at = (size_t)done;
        c.s = *session;
        c.s.q += at * q_row;
        c.s.k += at * k_row;
        c.s.v += at * k_row;
        c.s.y += at * q_row;
        if (c.s.gate) c.s.gate += at * q_row;
        c.first = done == 0;
        lay_out(&c, (int)pos + done, n);
        STI_TRY(run_piece(dev->stream, &c, err));
    }
    return STILL_OK;
}
