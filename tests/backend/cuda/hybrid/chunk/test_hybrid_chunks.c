/* test_hybrid_chunks.c - the chunk-parallel form of the cuda backend's hybrid operator
 * against the reference in double, setting by setting, for prompts cut at any place. */
#include "hybrid_chunks_sessions.h"

#include "backend/cuda/hybrid/chunk/chunk.h"

static const setting shapes[] = {
    CASE("C 128, D 128", "still", 128, -1, -1, 4, 2, 128, CUT(900)),
    CASE("C 128, D 64", "still", 128, 32, 100, 3, 1, 64, CUT(777)),
    CASE("C 64, D 128, list full", "still", 64, 16, 40, 2, 1, 128, CUT(700)),
    CASE("C 64, D 64, groups of 3", "still", 64, 20, 64, 6, 2, 64, CUT(650)),
    CASE("C 32, four heads a block", "still", 32, 8, 70, 4, 1, 64, CUT(333)),
    CASE("C 32, groups of 5", "still", 32, 8, 33, 5, 1, 64, CUT(200)),
    CASE("C 16", "still", 16, 5, 7, 2, 2, 64, CUT(250)),
    CASE("C 48, D 128", "still", 48, 48, 96, 2, 2, 128, CUT(400)),
    CASE("C 256, D 128", "still", 256, 64, 300, 1, 1, 128, CUT(1100)),
    CASE("C 144, D 64", "still", 144, 100, 190, 2, 1, 64, CUT(1000)),
    CASE("C 64, D 128, groups of 3", "still", 64, 16, 130, 6, 2, 128, CUT(500)),
    CASE("C 128, D 128, groups of 4", "still", 128, 32, 130, 4, 1, 128, CUT(1000)),
    CASE("C 128, D 128, list of a tile", "still", 128, 32, 128, 4, 1, 128, CUT(897)),
    CASE("C 128, D 128, one chunk", "still", 128, -1, -1, 4, 1, 128, CUT(101)),
    CASE("C 128, D 128, two and one", "still", 128, -1, -1, 4, 1, 128, CUT(257)),
    CASE("C 128, D 128, no list", "still", 128, 32, 0, 4, 1, 128, CUT(300, 84, 131)),
    CASE("C 64, D 128, list of a tile and one", "still", 64, 7, 129, 3, 1, 128,
         CUT(1333, 5, 190)),
    CASE("whole chunks", "still", 64, -1, -1, 2, 1, 64, CUT(512)),
    CASE("one chunk", "still", 64, -1, -1, 2, 1, 64, CUT(40)),
    CASE("two chunks and one", "still", 64, -1, -1, 2, 1, 64, CUT(129)),
    CASE("nothing folded at first", "still", 32, 32, 200, 2, 1, 64, CUT(450)),
    CASE("more than a piece", "still", 64, 16, 128, 1, 1, 64, CUT(8300)),
};

static const setting cuts[] = {
    CASE("cut C 128, D 128", "still", 128, -1, 200, 4, 2, 128,
         CUT(300, 84, 5, 123, 256, 7, 130, 40)),
    CASE("cut C 64", "still", 64, 16, 50, 3, 1, 64,
         CUT(64, 64, 30, 98, 10, 54, 150, 17)),
    CASE("cut C 16", "still", 16, 4, 9, 4, 2, 64, CUT(5, 6, 7, 40, 16, 9, 33, 90)),
    CASE("cut C 256", "still", 256, 16, 30, 2, 1, 64, CUT(255, 6, 256, 300, 9, 200)),
    /* Calls of a few tokens go through the recurrent form, on the same state. */
    CASE("cut, with steps", "still", 32, 8, 20, 4, 2, 64,
         CUT(70, 1, 58, 3, 100, 2, 27, 40)),
};

static const setting settings[] = {
    CASE("lolcats", "lolcats", 64, -1, -1, 4, 2, 64, CUT(500)),
    CASE("lolcats, D 128", "lolcats", 128, -1, -1, 2, 1, 128, CUT(300, 300)),
    CASE("lolcats, per head", "lolcats", 64, -1, -1, 4, 2, 128, CUT(300, 200),
         .per_head = true),
    CASE("lolcats, per head, D 64", "lolcats", 64, -1, -1, 4, 1, 64, CUT(333),
         .per_head = true),
    CASE("still, per head", "still", 64, 16, 60, 4, 2, 128, CUT(150, 250),
         .per_head = true),
    CASE("still, per head, D 64", "still", 32, 8, 40, 6, 2, 64, CUT(99, 1, 200),
         .per_head = true),
    CASE("per head, more than a piece", "still", 64, 16, 64, 8, 1, 64, CUT(1100),
         .per_head = true),
    CASE("swa", "swa", 64, -1, -1, 4, 2, 64, CUT(300)),
    CASE("swa, C 512", "swa", 512, -1, -1, 2, 1, 64, CUT(1200, 7, 400)),
    CASE("lolcats, C 512", "lolcats", 512, -1, -1, 2, 1, 64, CUT(700, 900)),
    CASE("lolcats, C 512, D 128", "lolcats", 512, -1, -1, 1, 1, 128, CUT(1300)),
    CASE("window scale", "still", 64, 16, 60, 2, 1, 128, CUT(500),
         .scale = STI_SCALE_WINDOW, .factor = true),
    CASE("window scale, C 128, no gate", "still", 128, 32, 60, 2, 1, 128, CUT(500),
         .scale = STI_SCALE_WINDOW, .no_gate = true),
    CASE("C 128, D 128, no gate, no maps", "still", 128, 32, 60, 4, 2, 128, CUT(600),
         .no_gate = true, .no_maps = true),
    CASE("window factor", "still", 64, 16, 60, 2, 1, 64, CUT(400), .factor = true),
    CASE("no gate, no alpha", "still", 64, 16, 60, 4, 2, 64, CUT(400), .no_gate = true,
         .no_alpha = true),
    CASE("identity maps", "still", 64, 16, 60, 2, 1, 128, CUT(450), .no_maps = true),
    CASE("identity, plain, C 32", "still", 32, 16, 60, 4, 1, 64, CUT(450),
         .no_maps = true, .plain = true),
    CASE("plain map", "still", 64, 16, 60, 2, 1, 64, CUT(450), .plain = true),
    CASE("state cap", "still", 64, 16, 60, 2, 1, 64, CUT(450), .state_cap = 90),
    CASE("floor", "still", 64, 16, 60, 2, 1, 64, CUT(450), .floor = 0.02),
    CASE("den_eps", "still", 64, 16, 60, 2, 1, 64, CUT(450), .den_eps = 0.5),
    CASE("key norm", "still", 64, 16, 60, 4, 2, 64, CUT(450),
         .score = STI_SCORE_KEYNORM),
    CASE("random", "still", 64, 16, 60, 6, 2, 64, CUT(450), .score = STI_SCORE_RANDOM),
    CASE("distinct", "still", 64, 16, 60, 4, 2, 64, CUT(450),
         .score = STI_SCORE_DISTINCT),
    CASE("distinct, all of a chunk, cuts", "still", 32, 32, 100, 6, 2, 128,
         CUT(40, 7, 90, 300), .score = STI_SCORE_DISTINCT),
    CASE("received", "still", 64, 16, 60, 4, 2, 64, CUT(450),
         .score = STI_SCORE_RECEIVED),
    CASE("received, D 128, one token more", "still", 128, 32, 100, 2, 1, 128,
         CUT(256, 513), .score = STI_SCORE_RECEIVED),
    CASE("received, small chunks, cuts", "still", 16, 4, 40, 6, 2, 64,
         CUT(5, 45, 33, 9, 60, 100), .score = STI_SCORE_RECEIVED),
    CASE("received, with steps", "still", 48, 20, 64, 3, 1, 64,
         CUT(70, 1, 100, 3, 48, 2, 90), .score = STI_SCORE_RECEIVED),
    CASE("received, per head", "still", 32, 8, 40, 4, 2, 128, CUT(99, 151),
         .score = STI_SCORE_RECEIVED, .per_head = true),
    CASE("received, C 256", "still", 256, 64, 300, 2, 1, 64, CUT(700, 330),
         .score = STI_SCORE_RECEIVED),
    CASE("received, more than a piece", "still", 64, 16, 64, 1, 1, 64, CUT(8300),
         .score = STI_SCORE_RECEIVED),
    CASE("received, capped", "still", 32, 8, 40, 4, 2, 64, CUT(250, 3, 100),
         .score = STI_SCORE_RECEIVED, .position_cap = 100, .raw_features = true),
    CASE("received, cap 0", "still", 64, 16, 0, 2, 1, 64, CUT(300),
         .score = STI_SCORE_RECEIVED),
    CASE("cap 0", "still", 64, 16, 0, 2, 1, 64, CUT(450)),
    CASE("select 0", "still", 64, 0, 60, 2, 1, 64, CUT(450)),
    CASE("list shorter than choice", "still", 64, 40, 16, 2, 1, 64, CUT(450)),
    CASE("cap 1024", "still", 32, 32, 1024, 2, 1, 64, CUT(1300)),
    CASE("large logits", "still", 64, 16, 60, 2, 1, 128, CUT(450), .gain = 6,
         .score = STI_SCORE_RANDOM),
    CASE("heavy state", "still", 64, 16, 60, 2, 1, 128, CUT(450), .alpha = 4),
    CASE("heavy state, D 64", "still", 32, 8, 20, 4, 2, 64, CUT(300, 77), .alpha = 6),
    CASE("heavy state, window scale", "still", 64, 16, 60, 2, 1, 128, CUT(450),
         .scale = STI_SCALE_WINDOW, .alpha = 3),
    CASE("light state, window scale", "still", 64, 16, 60, 2, 1, 64, CUT(450),
         .scale = STI_SCALE_WINDOW, .alpha = -3),
};

/* Streams longer than a model was trained for. Calls of a few tokens are steps of the
 * recurrent form, on the same state. */
static const setting positions[] = {
    CASE("capped", "still", 32, 8, 40, 4, 2, 64, CUT(500), .position_cap = 100,
         .raw_features = true, .state_cap = 104),
    CASE("capped, D 128", "still", 64, 16, 70, 4, 2, 128, CUT(700), .position_cap = 200,
         .raw_features = true, .state_cap = 198),
    CASE("capped, C 128", "still", 128, 32, 100, 2, 1, 128, CUT(900, 100),
         .position_cap = 300, .raw_features = true),
    CASE("capped, cut", "still", 32, 8, 40, 4, 2, 64,
         CUT(100, 3, 57, 120, 1, 40, 5, 200), .position_cap = 90, .raw_features = true),
    CASE("capped, cut, D 128", "still", 64, 16, 100, 2, 1, 128,
         CUT(300, 2, 90, 128, 4, 60), .position_cap = 150, .raw_features = true),
    CASE("capped, all far soon", "still", 16, 4, 80, 2, 1, 64, CUT(300, 50),
         .position_cap = 32, .raw_features = true),
    CASE("capped, none far", "still", 32, 8, 40, 2, 1, 64, CUT(300, 50),
         .position_cap = 1000, .raw_features = true),
    CASE("capped, features with positions", "still", 32, 8, 40, 2, 1, 64, CUT(200, 150),
         .position_cap = 100),
    CASE("features without positions", "still", 32, 8, 40, 4, 2, 64, CUT(200, 150),
         .raw_features = true),
    CASE("capped, interleaved", "still", 32, 8, 40, 4, 2, 64, CUT(200, 3, 150),
         .position_cap = 100, .raw_features = true, .interleaved = true),
    CASE("capped, no maps", "still", 32, 8, 40, 4, 2, 64, CUT(350), .position_cap = 100,
         .raw_features = true, .no_maps = true),
    CASE("capped, per head", "still", 32, 8, 40, 4, 2, 64, CUT(250, 100),
         .position_cap = 100, .raw_features = true, .per_head = true),
    CASE("capped, window scale", "still", 32, 8, 40, 4, 2, 64, CUT(250, 100),
         .position_cap = 100, .raw_features = true, .scale = STI_SCALE_WINDOW),
    CASE("capped, lolcats", "lolcats", 64, -1, -1, 4, 2, 64, CUT(300, 100),
         .position_cap = 150, .raw_features = true),
    CASE("capped, swa", "swa", 64, -1, -1, 4, 2, 64, CUT(300), .position_cap = 150,
         .raw_features = true),
};

/* Lists of any length, and heads whose lists differ, down to none at all. */
static const setting lists[] = {
    CASE("list of 1500", "still", 64, 40, 1500, 1, 1, 64, CUT(2000, 1100),
         .score = STI_SCORE_KEYNORM),
    CASE("list too long to share", "still", 64, 60, 4500, 1, 1, 64, CUT(5000, 1000),
         .score = STI_SCORE_KEYNORM),
    CASE("one token of a chunk", "still", 16, 1, 3, 1, 1, 64, CUT(8200, 1, 40)),
    CASE("all of a chunk", "still", 32, 32, 500, 2, 1, 64, CUT(1500, 3, 200),
         .score = STI_SCORE_KEYNORM),
    CASE("33 of a chunk", "still", 64, 33, 100, 2, 1, 64, CUT(3000),
         .score = STI_SCORE_KEYNORM),
    CASE("uneven", "still", 32, 12, 90, 6, 3, 64, CUT(500), .uneven = true),
    CASE("uneven, cut", "still", 32, 12, 90, 6, 3, 64, CUT(200, 3, 150, 1, 97),
         .uneven = true),
    CASE("uneven, D 128", "still", 64, 24, 130, 4, 4, 128, CUT(500, 300),
         .uneven = true),
    CASE("uneven, Hopper", "still", 64, 16, 1100, 4, 4, 128, CUT(6000), .uneven = true,
         .score = STI_SCORE_KEYNORM),
    CASE("uneven, C 128, D 128", "still", 128, 32, 300, 8, 4, 128, CUT(1100, 77),
         .uneven = true),
    CASE("uneven, per head", "still", 32, 8, 60, 6, 3, 64, CUT(300, 99), .uneven = true,
         .per_head = true),
    CASE("uneven, state cap", "still", 32, 8, 70, 6, 3, 64, CUT(350, 2, 50),
         .uneven = true, .state_cap = 150, .alpha = 1),
    CASE("uneven, capped", "still", 32, 8, 70, 6, 3, 64, CUT(200, 3, 250),
         .uneven = true, .position_cap = 100, .raw_features = true),
    CASE("long list, capped", "still", 32, 30, 1200, 2, 2, 64, CUT(1500),
         .uneven = true, .position_cap = 700, .raw_features = true,
         .score = STI_SCORE_KEYNORM),
    CASE("uneven, received", "still", 32, 8, 70, 6, 3, 64, CUT(200, 150),
         .uneven = true, .score = STI_SCORE_RECEIVED),
};

/* Quantized salient tokens. */
static const setting quantized[] = {
    CASE("keys 8, values 4", "still", 32, 12, 90, 6, 3, 64, CUT(500), .key_bits = 8,
         .value_bits = 4),
    CASE("keys 5, values 3, cut", "still", 32, 12, 60, 6, 3, 64,
         CUT(200, 3, 150, 1, 97), .key_bits = 5, .value_bits = 3),
    CASE("keys 8, values 3", "still", 64, 16, 70, 4, 2, 64, CUT(300, 200),
         .key_bits = 8, .value_bits = 3, .score = STI_SCORE_DISTINCT),
    CASE("keys 5", "still", 64, 16, 70, 4, 2, 64, CUT(300, 200), .key_bits = 5),
    CASE("values 4", "still", 64, 16, 70, 4, 2, 64, CUT(300, 200), .value_bits = 4),
    CASE("quantized, D 128", "still", 64, 24, 130, 4, 2, 128, CUT(500, 1, 300),
         .key_bits = 5, .value_bits = 3),
    CASE("quantized, per head", "still", 32, 8, 60, 6, 3, 64, CUT(300, 99),
         .per_head = true, .key_bits = 8, .value_bits = 4),
    CASE("quantized, uneven", "still", 32, 12, 90, 6, 3, 64, CUT(200, 300),
         .uneven = true, .key_bits = 5, .value_bits = 3),
    CASE("quantized, raw features", "still", 32, 8, 40, 4, 2, 64, CUT(200, 150),
         .raw_features = true, .key_bits = 8, .value_bits = 4),
    /* Where half and double differ, a level may too: once a key is far it has been
     * rounded twice. */
    CASE("quantized, capped", "still", 32, 8, 70, 4, 2, 64, CUT(450),
         .position_cap = 100, .raw_features = true, .state_cap = 134, .key_bits = 8,
         .value_bits = 4),
    CASE("quantized, capped, uneven, cut", "still", 32, 8, 70, 6, 3, 64,
         CUT(200, 3, 57, 120, 1, 5, 90), .uneven = true, .position_cap = 100,
         .raw_features = true, .key_bits = 5, .value_bits = 3),
    CASE("quantized, capped, D 128", "still", 64, 16, 100, 4, 2, 128,
         CUT(300, 2, 90, 128, 4, 60), .position_cap = 150, .raw_features = true,
         .key_bits = 8, .value_bits = 4),
    CASE("quantized, capped, uneven, D 128", "still", 32, 12, 90, 4, 4, 128,
         CUT(250, 200), .uneven = true, .position_cap = 130, .raw_features = true,
         .key_bits = 5, .value_bits = 3),
    CASE("quantized, capped, no state", "still", 32, 32, 150, 6, 3, 64,
         CUT(200, 3, 57, 240), .uneven = true, .position_cap = 100,
         .raw_features = true, .no_state = true, .score = STI_SCORE_DISTINCT,
         .key_bits = 5, .value_bits = 3),
    CASE("values 4, capped", "still", 32, 8, 70, 4, 2, 64, CUT(250, 3, 150),
         .position_cap = 100, .raw_features = true, .value_bits = 4),
    CASE("keys 5, capped, all far soon", "still", 16, 4, 80, 2, 1, 64, CUT(300, 50),
         .position_cap = 32, .raw_features = true, .key_bits = 5),
    CASE("quantized, no state", "still", 32, 32, 150, 6, 3, 64, CUT(300, 200),
         .uneven = true, .no_state = true, .key_bits = 8, .value_bits = 4),
    CASE("quantized, list of 1500", "still", 64, 40, 1500, 1, 1, 64, CUT(2000, 1100),
         .score = STI_SCORE_KEYNORM, .key_bits = 5, .value_bits = 3),
};

/* Methods that fold every token before its own output. */
static const setting no_window[] = {
    CASE("hedgehog", "hedgehog", 64, -1, -1, 4, 2, 64, CUT(300)),
    CASE("hedgehog, D 128", "hedgehog", 64, -1, -1, 4, 2, 128, CUT(100, 3, 65)),
    CASE("hedgehog, cut", "hedgehog", 64, -1, -1, 3, 3, 64,
         CUT(5, 32, 1, 31, 33, 64, 2, 7)),
    CASE("hedgehog, per head", "hedgehog", 64, -1, -1, 4, 2, 64, CUT(150),
         .per_head = true),
    CASE("hedgehog, no maps, floor", "hedgehog", 64, -1, -1, 2, 1, 64, CUT(90),
         .no_maps = true, .floor = 0.01),
    CASE("hedgehog, no gate", "hedgehog", 64, -1, -1, 2, 1, 64, CUT(90),
         .no_gate = true),
    CASE("hedgehog, more than a piece", "hedgehog", 64, -1, -1, 1, 1, 64, CUT(2100)),
    CASE("t2r", "t2r", 64, -1, -1, 4, 2, 64, CUT(70, 6, 100)),
    CASE("t2r, D 128", "t2r", 64, -1, -1, 2, 1, 128, CUT(200)),
    CASE("t2r, per head", "t2r", 64, -1, -1, 4, 2, 128, CUT(77, 40), .per_head = true),
};

static void test_setting(void **state)
{
    const setting *s = *state;
    const gpu *g = need_gpu();
    problem p = draw_clear(s, 1000);
    session x = open_session(g, &p, s->interleaved);
    feed(&p, 0, p.T);
    for (int i = 0; i < CUTS && s->cut[i] > 0; i++) feed_gpu(&x, s->cut[i]);
    compare(s->name, &x);
    close_session(&x);
    drop(&p);
}

/* What linearize makes, and what runs without training, whatever the caps, bits,
 * positions and scores: chunks, not one token after the other. */
static void test_takes_all(void **state)
{
    (void)state;
    static const sti_score_kind scores[] = {STI_SCORE_S3, STI_SCORE_DISTINCT,
                                            STI_SCORE_RECEIVED, STI_SCORE_KEYNORM,
                                            STI_SCORE_RANDOM};
    static const int bits[][2] = {{0, 0}, {8, 4}, {5, 3}, {8, 3}, {5, 0}, {0, 4}};
    need_gpu();
    for (int how = 0; how < 16; how++)
        for (size_t b = 0; b < COUNT(bits); b++)
            for (size_t s = 0; s < COUNT(scores); s++) {
                const bool capped = how & 1, forget = how & 2;
                const setting c = {.method = "still",
                                   .chunk = how & 4 ? 64 : 128,
                                   .select = how & 4 ? 64 : 32,
                                   .cap = how & 8 ? 7680 : 256,
                                   .score = scores[s],
                                   .position_cap = capped ? 2048 : 0,
                                   .raw_features = capped,
                                   .uneven = how & 8,
                                   .no_state = forget,
                                   .key_bits = bits[b][0],
                                   .value_bits = bits[b][1]};
                const sti_hybrid_settings set = settings_of(&c);
                const sti_hybrid_shape shape = {9, 3, 64, 64};
                const sti_cuda_hybrid_params h =
                    sti_cuda_hybrid_params_of(&set, &shape, &(sti_hybrid_in){0}, 2);
                if (!sti_cuda_hybrid_chunk_supported(&h))
                    fail_msg("settings %d, bits %zu, score %zu: token by token", how, b,
                             s);
            }
}

int main(void)
{
    struct CMUnitTest tests[1 + COUNT(shapes) + COUNT(cuts) + COUNT(settings) +
                            COUNT(positions) + COUNT(lists) + COUNT(quantized) +
                            COUNT(no_window)] = {cmocka_unit_test(test_takes_all)};
    size_t n = 1;
    n = add_cases(tests, n, test_setting, shapes, COUNT(shapes), sizeof *shapes);
    n = add_cases(tests, n, test_setting, cuts, COUNT(cuts), sizeof *cuts);
    n = add_cases(tests, n, test_setting, settings, COUNT(settings), sizeof *settings);
    n = add_cases(tests, n, test_setting, positions, COUNT(positions),
                  sizeof *positions);
    n = add_cases(tests, n, test_setting, lists, COUNT(lists), sizeof *lists);
    n = add_cases(tests, n, test_setting, quantized, COUNT(quantized),
                  sizeof *quantized);
    add_cases(tests, n, test_setting, no_window, COUNT(no_window), sizeof *no_window);
    return cmocka_run_group_tests(tests, open_chunks_gpu, close_gpu);
}
