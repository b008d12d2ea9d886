/* test_hybrid_step_batches.c - the recurrent form of the hybrid operator on the GPU, as
 * it is called: batches of hundreds of sessions, passes that are recorded and replayed,
 * chunks that leave again. */
#include "hybrid_step_sessions.h"

/* ---- Leaving again ------------------------------------------------------- */

/* Whatever the scores are, and if a chunk leaves twice, so that the list has its tokens
 * already: no list is longer than its room, and what it names is there. */
static void test_leaves_again(void **state)
{
    (void)state;
    static const test_case c = {
        "leaves again", "still", 8, {4, 2, 16, 16}, 75, small_cap, false, false, 0};
    static run r;
    const gpu *g = need_gpu();
    for (int kind = 0; kind < 3; kind++) {
        sti_cuda_hybrid_session table[SESSIONS];
        const int32_t pos[SESSIONS] = {64, 64, 64};
        open_run(&r, g, &c, 2, 7, false);
        for (int call = 1; feed_some(&r, call, 0);) call++;
        const size_t S = (size_t)r.h.S, slots = S * 2 * (size_t)r.h.C;
        float score[64];
        assert_true(slots <= sizeof score / sizeof *score);
        for (size_t j = 0; j < slots; j++) score[j] = kind == 1 ? 0.5f : -NAN;
        for (int i = 0; i < SESSIONS; i++) {
            table[i] = describe(&r, i, 1);
            if (kind > 0) move(g, r.x[i].st.win_score, score, slots * sizeof *score);
        }
        move(g, r.table.p, table, sizeof table);
        move(g, r.pos.p, pos, sizeof pos);
        for (int again = 0; again < 6; again++) {
            still_error err;
            assert_int_equal(sti_cuda_hybrid_retire(g->dev, &r.h, r.table.p, SESSIONS,
                                                    0, r.room.p, &err),
                             STILL_OK);
        }
        for (int i = 0; i < SESSIONS; i++) {
            const sti_hybrid_state *st = &r.x[i].st;
            const size_t room = (size_t)st->sal_capacity;
            int32_t *count = download(g, st->sal_count, S * sizeof *count);
            int32_t *at = download(g, st->sal_pos, S * room * sizeof *at);
            for (size_t s = 0; s < S; s++) {
                assert_int_equal(count[s], st->sal_capacity);
                for (size_t j = 0; j < room; j++)
                    assert_in_range(at[s * room + j], 0, c.T - 1);
            }
            free(count);
            free(at);
        }
        close_run(&r);
    }
}

/* ---- Batches ------------------------------------------------------------- */

/* n sessions that are copies of those of the run, before their last token, take it
 * together: as many units as there are for so many. */
static void check_batch(run *r, int n)
{
    const gpu *g = r->g;
    const size_t row = (size_t)(r->h.H * r->h.D), S = (size_t)r->h.S;
    sti_cuda_hybrid_session *table = calloc((size_t)n, sizeof *table);
    sti_hybrid_state *st = calloc((size_t)n, sizeof *st);
    sti_block *state = calloc((size_t)n, sizeof *state);
    int32_t *pos = calloc((size_t)n, sizeof *pos);
    assert_true(table && st && state && pos);
    sti_block y = new_block(g, (size_t)n * row * sizeof(float));
    sti_block room = new_block(g, sti_cuda_hybrid_step_scratch(g->dev, &r->h, n));
    sti_block on_table = new_block(g, (size_t)n * sizeof *table);
    sti_block on_pos = new_block(g, (size_t)n * sizeof *pos);
    for (int i = 0; i < n; i++) {
        const session *x = &r->x[i % SESSIONS];
        const problem *p = x->p;
        sti_carve c = {0};
        sti_hybrid_state_carve(&st[i], &c, &p->set, &p->shape, p->T, r->kv_size,
                               sizeof(float));
        state[i] = new_block(g, c.used);
        move(g, state[i].p, x->state.p, c.used);
        c = (sti_carve){.base = state[i].p};
        sti_hybrid_state_carve(&st[i], &c, &p->set, &p->shape, p->T, r->kv_size,
                               sizeof(float));
        pos[i] = x->past;
        table[i] = describe(r, i % SESSIONS, 1);
        const sti_hybrid_args args = {.T = 1,
                                      .in = {.q = table[i].q,
                                             .k = table[i].k,
                                             .v = table[i].v,
                                             .gate_logit = table[i].gate,
                                             .q_raw = table[i].q_raw},
                                      .state = &st[i],
                                      .y = (float *)y.p + (size_t)i * row};
        table[i] = sti_cuda_hybrid_session_of(&args, (const int32_t *)on_pos.p + i);
    }
    move(g, on_table.p, table, (size_t)n * sizeof *table);
    move(g, on_pos.p, pos, (size_t)n * sizeof *pos);
    still_error err;
    if (sti_cuda_hybrid_retire(g->dev, &r->h, on_table.p, n, 0, room.p, &err) !=
            STILL_OK ||
        sti_cuda_hybrid_step(g->dev, &r->h, on_table.p, n, 0, false, room.p, &err) !=
            STILL_OK)
        fail_msg("%s: %s", r->c->name, err.text);
    for (int i = 0; i < n; i++) {
        const problem *p = r->x[i % SESSIONS].p;
        int64_t *folded = download(g, st[i].folded, S * sizeof *folded);
        for (size_t s = 0; s < S; s++) assert_int_equal(folded[s], p->st.folded[s]);
        free(folded);
        compare(r, i, "y of a batch", (float *)y.p + (size_t)i * row,
                p->y + (size_t)(p->T - 1) * row, row,
                r->kv_size == 4        ? 1e-5
                : r->c->half_limit > 0 ? r->c->half_limit
                                       : 1e-4);
        g->be->mem_free(g->dev, &state[i]);
    }
    g->be->mem_free(g->dev, &y);
    g->be->mem_free(g->dev, &room);
    g->be->mem_free(g->dev, &on_table);
    g->be->mem_free(g->dev, &on_pos);
    free(table);
    free(st);
    free(state);
    free(pos);
}

static const test_case batches[] = {
    {"SmolLM2, batch", "still", 16, {9, 3, 64, 64}, 97, NULL, false, false, 0},
    {"8B, batch", "still", 32, {8, 2, 128, 128}, 200, NULL, false, false, 0},
    {"per head, batch", "still", 16, {4, 2, 64, 64}, 36, per_head, false, false, 0},
    {"uneven, batch", "still", 16, {9, 3, 64, 64}, 400, long_list, false, false, 0},
    {"quantized, batch",
     "still",
     16,
     {9, 3, 64, 64},
     400,
     quantized_long,
     false,
     false,
     1e-3},
    {"lolcats, batch", "lolcats", 16, {4, 2, 64, 64}, 65, NULL, false, false, 0},
    {"hedgehog, batch", "hedgehog", 16, {4, 2, 64, 64}, 30, NULL, false, false, 0},
    {"swa, batch", "swa", 128, {4, 2, 64, 64}, 300, NULL, false, false, 0}};

/* One session is cut into many units, hundreds into few: the same outputs. Sessions are
 * in their first chunk, in the middle of one, and at its first token. */
static void test_batch(void **state)
{
    static const int sizes[] = {1, 2, 12, 256};
    const test_case *c = *state;
    const gpu *g = need_gpu();
    for (size_t kv_size = 2; kv_size <= 4; kv_size += 2) {
        static run r;
        open_run(&r, g, c, kv_size, 31 + (uint64_t)(c - batches), false);
        const bool runs = kv_size == 2 || !sti_cuda_hybrid_quantized(&r.h);
        for (int call = 1; runs && feed_some(&r, call, 1);) call++;
        for (size_t j = 0; runs && j < COUNT(sizes); j++) check_batch(&r, sizes[j]);
        close_run(&r);
    }
}

/* ---- Passes -------------------------------------------------------------- */

/* Rows of a pass, which lie in the same place every time. */
typedef struct pass_rows {
    sti_block q, k, v, gate, raw, y;
    float inv_freq[64];
} pass_rows;

static void move_row(const gpu *g, const sti_block *to, size_t m, const sti_block *from,
                     size_t t, size_t row)
{
    move(g, (float *)to->p + m * row, (const float *)from->p + t * row,
         row * sizeof(float));
}

/* The next token of every session that has one. rope: a kernel in front turns the rows,
 * where the step would see at once that it has not waited for it. */
static bool feed_pass(run *r, const pass_rows *b, bool rope)
{
    const gpu *g = r->g;
    const size_t HD = (size_t)(r->h.H * r->h.D), GD = (size_t)(r->h.G * r->h.D);
    const int32_t tok[SESSIONS] = {0};
    int32_t pos[SESSIONS];
    sti_hybrid_args a[SESSIONS];
    session *who[SESSIONS];
    uint64_t key[2] = {0, r->p[0].set.seed}; /* who takes part, in which run */
    int M = 0;
    for (int i = 0; i < SESSIONS; i++) {
        session *x = &r->x[i];
        if (x->past >= x->p->T) continue;
        const size_t m = (size_t)M, t = (size_t)x->past;
        move_row(g, &b->q, m, &x->q, t, HD);
        move_row(g, &b->k, m, &x->k, t, GD);
        move_row(g, &b->v, m, &x->v, t, GD);
        move_row(g, &b->gate, m, &x->gate, t, HD);
        move_row(g, &b->raw, m, &x->q, t, HD);
        a[M] = (sti_hybrid_args){.set = &x->p->set,
                                 .shape = x->p->shape,
                                 .T = 1,
                                 .in = {.q = (float *)b->q.p + m * HD,
                                        .k = (float *)b->k.p + m * GD,
                                        .v = (float *)b->v.p + m * GD,
                                        .gate_logit = (float *)b->gate.p + m * HD,
                                        .alpha = r->in.alpha.p,
                                        .window_logit = r->in.window.p,
                                        .map_q = r->in.map_q.p,
                                        .map_k = r->in.map_k.p,
                                        .bias_q = r->in.bias_q.p,
                                        .bias_k = r->in.bias_k.p,
                                        .inv_freq = b->inv_freq,
                                        .interleaved = r->c->interleaved,
                                        .q_raw = (float *)b->raw.p + m * HD,
                                        .unrotated = !rope},
                                 .state = &x->st,
                                 .y = (float *)b->y.p + m * HD};
        x->st.pos = x->past;
        pos[M] = x->past;
        key[0] |= (uint64_t)1 << i;
        who[M++] = x;
    }
    if (M == 0) return false;
    const sti_pass pass = {.tok = tok,
                           .pos = pos,
                           .M = M,
                           .key = key,
                           .n_key = 2,
                           .one_each = true,
                           .chunk = r->h.C};
    const sti_rope_args turn = {.x = b->q.p,
                                .also = b->k.p,
                                .pos = pos,
                                .inv_freq = b->inv_freq,
                                .M = M,
                                .heads = r->h.H,
                                .also_heads = r->h.G,
                                .D = r->h.D,
                                .interleaved = r->c->interleaved};
    bool done;
    still_error err;
    assert_true(g->be->hybrid_applies_rope(a, M));
    if (g->be->pass_begin(g->dev, &pass, &done, &err) != STILL_OK ||
        (!done && rope && g->be->rope(g->dev, &turn, &err) != STILL_OK) ||
        (!done && g->be->hybrid(g->dev, a, M, &err) != STILL_OK) ||
        g->be->pass_end(g->dev, true, &err) != STILL_OK)
        fail_msg("%s: %s", r->c->name, err.text);
    for (int m = 0; m < M; m++)
        move_row(g, &who[m]->y, (size_t)who[m]->past++, &b->y, (size_t)m, HD);
    return true;
}

static void check_passes(const gpu *g, const test_case *c, uint64_t seed, bool rope)
{
    static run r;
    open_run(&r, g, c, 2, seed, true);
    const size_t HD = SESSIONS * (size_t)(r.h.H * r.h.D) * sizeof(float);
    const size_t GD = SESSIONS * (size_t)(r.h.G * r.h.D) * sizeof(float);
    pass_rows b = {.q = new_block(g, HD),
                   .k = new_block(g, GD),
                   .v = new_block(g, GD),
                   .gate = new_block(g, HD),
                   .raw = new_block(g, HD),
                   .y = new_block(g, HD)};
    for (int i = 0; i < r.h.D / 2; i++) b.inv_freq[i] = (float)r.p[0].inv_freq[i];
    while (feed_pass(&r, &b, rope)) {}
    for (int i = 0; i < SESSIONS; i++) compare_session(&r, i);
    sti_block *all[] = {&b.q, &b.k, &b.v, &b.gate, &b.raw, &b.y};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        g->be->mem_free(g->dev, all[i]);
    close_run(&r);
}

static const test_case passes[] = {
    {"passes", "still", 16, {6, 2, 64, 64}, 100, small_cap, false, false, 2e-3},
    {"passes, quantized",
     "still",
     16,
     {9, 3, 64, 64},
     500,
     quantized_long,
     false,
     false,
     1e-2},
    {"passes, far", "still", 8, {4, 2, 128, 128}, 90, far_and_raw, true, false, 2e-3},
    {"passes, lolcats", "lolcats", 16, {4, 2, 64, 64}, 70, NULL, false, false, 2e-3},
    {"passes, SmolLM2", "still", 128, {9, 3, 64, 64}, 290, NULL, false, false, 2e-3},
    {"passes, swa", "swa", 64, {4, 2, 64, 64}, 150, NULL, false, false, 2e-3},
    {"passes, narrow",
     "still",
     16,
     {6, 2, 40, 24},
     60,
     random_scores,
     false,
     false,
     2e-3},
    {"passes, per head",
     "still",
     16,
     {4, 2, 128, 128},
     50,
     per_head,
     false,
     false,
     2e-3},
    {"passes, wide group", "still", 16, {12, 2, 64, 64}, 60, NULL, false, false, 2e-3},
    {"passes, received",
     "still",
     16,
     {6, 2, 64, 64},
     60,
     received,
     false,
     false,
     2e-3}};

/* Through the entry, in passes that are recorded and replayed, some with a chunk that
 * leaves; sessions end one after the other. */
static void test_passes(void **state)
{
    const test_case *c = *state;
    const uint64_t seed = 17 + 2 * (uint64_t)(c - passes);
    const gpu *g = need_gpu();
    for (unsigned rope = 0; rope < 2; rope++)
        check_passes(g, c, seed + rope, rope != 0);
}

int main(void)
{
    struct CMUnitTest tests[1 + COUNT(batches) + COUNT(passes)] = {
        cmocka_unit_test(test_leaves_again)};
    const size_t n =
        add_cases(tests, 1, test_batch, batches, COUNT(batches), sizeof *batches);
    add_cases(tests, n, test_passes, passes, COUNT(passes), sizeof *passes);
    return cmocka_run_group_tests(tests, open_step_gpu, close_gpu);
}
