/* Whole training runs on a small random model with a tokenizer: every method learns;
 * accumulation, mixing, masking, distillation and dropout; runs that are stopped after
 * each step and gone on with; what divergence, a full disk and a change of mind leave
 * behind. The shell's side of it is tests/cli/test_linearize.sh. */
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/random.h"
#include "train/train.h"

enum { SEQ = 32, BATCH = 4, MOST = 64, LAYERS = 3, STEPS = 5 };

static char dir[] = "/tmp/still-linearize-XXXXXX";
static still_model *model;
static still_train_data data[2];

static void must(still_status st, const still_error *e)
{
    if (st != STILL_OK) fail_msg("%s", e->text);
}

/* ---- Files --------------------------------------------------------------- */

enum { PLACES = 8 };
/* A path in the test's folder, good for the next PLACES calls. */
static char *in_dir(const char *name)
{
    static char path[PLACES][256];
    static int next;
    char *p = path[next++ % PLACES];
    snprintf(p, sizeof path[0], "%s/%s", dir, name);
    return p;
}

static void remove_all(const char *folder)
{
    char path[512];
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%.200s/%s", folder, e->d_name);
        if (unlink(path) != 0) remove_all(path);
    }
    if (d) closedir(d);
    rmdir(folder);
}

static char *read_all(const char *folder, const char *name, size_t *n)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "rb");
    if (!f) fail_msg("%s is missing", path);
    fseek(f, 0, SEEK_END);
    *n = (size_t)ftell(f);
    rewind(f);
    char *p = malloc(*n + 1);
    assert_int_equal(fread(p, 1, *n, f), *n);
    p[*n] = 0;
    fclose(f);
    return p;
}

static bool same_file(const char *a, const char *b, const char *name)
{
    size_t n, k;
    char *p = read_all(a, name, &n), *q = read_all(b, name, &k);
    const bool same = n == k && memcmp(p, q, n) == 0;
    free(p);
    free(q);
    return same;
}

static int count_files(const char *folder, const char *part)
{
    int n = 0;
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));)
        n += e->d_name[0] != '.' && strstr(e->d_name, part) != NULL;
    if (d) closedir(d);
    return n;
}

static const char *random_word(uint64_t *seed)
{
    static const char *const word[] = {"the", "sun", "in", "hot", "river", "a", "then"};
    return word[sti_mix64((*seed)++) % 7];
}

/* A text of exactly BATCH sequences (a letter and its space are two tokens, and EOS
 * ends it), so that every step sees all of it and losses can be compared. */
static void write_text(const char *path)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("{\"text\": \"", f);
    for (uint64_t i = 0; i < SEQ * BATCH / 2; i++)
        fprintf(f, "%c ", (int)('k' + sti_mix64(i) % 8));
    fputs("\"}\n", f);
    fclose(f);
}

static void write_records(const char *path, uint64_t seed, int records)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < records; i++) {
        for (int part = 0; part < 2; part++) {
            fputs(part ? "\", \"output\": \"" : "{\"instruction\": \"", f);
            for (int k = 0; k < 6; k++) fprintf(f, "%s ", random_word(&seed));
        }
        fputs("\"}\n", f);
    }
    fclose(f);
}

/* ---- Runs ---------------------------------------------------------------- */

typedef struct run {
    still_train_params p;
    still_train_progress step[MOST];
    int n;
    int stop_after; /* steps from now; 0: never */
    still_error err;
} run;

static bool each(void *user, const still_train_progress *p)
{
    run *r = user;
    assert_true(r->n < MOST);
    r->step[r->n++] = *p;
    return r->stop_after == 0 || r->n < r->stop_after;
}

static void setup(run *r, const char *method, int stage, int steps)
{
    still_error e;
    *r = (run){0};
    must(still_method_init(&r->p.method, method, 6, &e), &e);
    r->p.data = data;
    r->p.n_data = 1;
    r->p.cache_dir = in_dir("cache");
    r->p.base_name = "model.gguf";
    r->p.stage = stage;
    r->p.seq = SEQ;
    r->p.batch = BATCH;
    r->p.tokens = (uint64_t)(steps * SEQ * BATCH);
    r->p.held_out = -1;
    r->p.lora_rank = 2;
    r->p.lr[2] = 2e-3;
    r->p.each = each;
}

static still_status go(run *r, const char *out)
{
    r->p.out = in_dir(out);
    r->p.user = r;
    r->n = 0;
    return still_linearize(model, &r->p, &r->err);
}

static void train(run *r, const char *out)
{
    remove_all(in_dir(out));
    must(go(r, out), &r->err);
}

static int set_up(void **state)
{
    (void)state;
    char command[512];
    still_error e;
    if (!mkdtemp(dir)) return 1;
    snprintf(command, sizeof command,
             STILL_TOOLS "/make-model tiny %s/model.gguf --layers %d --type f32 "
                         ">/dev/null 2>&1",
             dir, LAYERS);
    if (system(command) != 0) return 1;
    write_text(in_dir("one.jsonl"));
    write_records(in_dir("two.jsonl"), 1000, 12);
    data[0].path = strdup(in_dir("one.jsonl"));
    data[1].path = strdup(in_dir("two.jsonl"));
    must(still_model_open(in_dir("model.gguf"), &(still_model_params){.threads = 1},
                          &model, &e),
         &e);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    still_model_free(model);
    remove_all(dir);
    free((void *)data[0].path);
    free((void *)data[1].path);
    return 0;
}

/* ---- Learning ------------------------------------------------------------ */

/* The loss at the end of each stage is below that at its start. */
static void falls(const run *r, const char *what)
{
    for (int s = 1; s <= 2; s++) {
        double first = NAN, last = NAN;
        for (int i = 0; i < r->n; i++) {
            assert_true(isfinite(r->step[i].loss));
            if (r->step[i].stage != s) continue;
            if (isnan(first)) first = r->step[i].loss;
            last = r->step[i].loss;
        }
        if (!isnan(first) && !(last < first))
            fail_msg("%s, stage %d: loss %.5f at first, %.5f at last", what, s, first,
                     last);
    }
}

static void every_method_learns(void **state)
{
    (void)state;
    static const struct {
        const char *method;
        bool plain, per_head, window, weights;
        int stages; /* that have something to learn */
    } c[] = {{"still", .stages = 2},
             {"still", .plain = true, .stages = 2},
             {"still", .per_head = true, .window = true, .stages = 2},
             {"still", .weights = true, .stages = 2},
             {"lolcats", .stages = 2},
             {"lolcats", .weights = true, .stages = 2},
             {"hedgehog", .stages = 2},
             {"t2r", .stages = 2},
             {"supra", .stages = 2},
             {"swa", .stages = 1},
             {"liger", .stages = 1}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        run r;
        still_model *m;
        still_session *s;
        still_error e;
        setup(&r, c[i].method, 0, STEPS);
        if (c[i].plain) r.p.method.gate = r.p.method.norm_map = false;
        r.p.method.per_head = c[i].per_head;
        r.p.method.window_scale = c[i].window || strcmp(c[i].method, "lolcats") == 0;
        r.p.match_weights = c[i].weights;
        train(&r, "method");
        falls(&r, c[i].method);
        assert_int_equal(r.n, STEPS * c[i].stages);
        /* And what it wrote runs. */
        const int32_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
        must(still_model_open(
                 in_dir("model.gguf"),
                 &(still_model_params){.threads = 1, .adapter = in_dir("method")}, &m,
                 &e),
             &e);
        must(still_session_new(m, &(still_session_params){.ctx = 64}, &s, &e), &e);
        must(still_session_feed(s, ids, 12, &e), &e);
        assert_true(isfinite(still_session_logits(s)[0]));
        still_session_free(s);
        still_model_free(m);
    }
}

static void options_learn(void **state)
{
    (void)state;
    run r;
    setup(&r, "still", 2, 8);
    r.p.kd = 0.5;
    train(&r, "kd");
    falls(&r, "kd");
    assert_true(r.step[1].kl > 0);
    /* Both files: three sequences of the first for one of the second. */
    setup(&r, "still", 1, STEPS);
    r.p.n_data = 2;
    data[0].weight = 3, data[1].weight = 1;
    train(&r, "mixed");
    const double mixed = r.step[0].loss;
    data[0].weight = data[1].weight = 1;
    train(&r, "even");
    data[0].weight = data[1].weight = 0;
    assert_true(mixed != r.step[0].loss);
    /* Outputs alone are another loss. */
    setup(&r, "still", 2, STEPS);
    r.p.data = data + 1;
    train(&r, "all");
    const double all = r.step[0].loss;
    r.p.mask_prompt = true;
    train(&r, "masked");
    assert_true(r.step[0].loss != all);
}

/* A batch at once or in parts: the same loss at every step, within rounding. */
static void accumulation(void **state)
{
    (void)state;
    for (int stage = 1; stage <= 2; stage++) {
        run one, r;
        setup(&one, "still", stage, 4);
        one.p.data = data + 1;
        one.p.mask_prompt = true; /* parts of unequal weight */
        train(&one, "micro");
        for (int micro = 2; micro <= BATCH; micro *= 2) {
            setup(&r, "still", stage, 4);
            r.p.data = data + 1;
            r.p.mask_prompt = true;
            r.p.micro = micro;
            train(&r, "micro");
            for (int i = 0; i < 4; i++)
                if (fabs(r.step[i].loss - one.step[i].loss) > 2e-5 * one.step[i].loss)
                    fail_msg("stage %d, %d at once, step %d: loss %.9g, not %.9g",
                             stage, micro, i, r.step[i].loss, one.step[i].loss);
        }
    }
}

static void dropout_repeats(void **state)
{
    (void)state;
    run r;
    for (int i = 0; i < 3; i++) {
        setup(&r, "still", 2, 3);
        r.p.lora_dropout = i < 2 ? 0.2 : 0;
        train(&r, i == 0 ? "dropped" : i == 1 ? "again" : "kept");
    }
    assert_true(same_file(in_dir("dropped"), in_dir("again"), STI_ADAPTER_TENSORS));
    assert_false(same_file(in_dir("dropped"), in_dir("kept"), STI_ADAPTER_TENSORS));
}

/* Layers outside the range have no entry, and keep all of the past. */
static void some_layers(void **state)
{
    (void)state;
    run r;
    still_error e;
    sti_store s = {0};
    char path[512];
    setup(&r, "still", 0, 3);
    r.p.method.first_layer = 1;
    r.p.method.last_layer = 2;
    train(&r, "layers");
    falls(&r, "layers 1-2");
    snprintf(path, sizeof path, "%s/" STI_ADAPTER_TENSORS, in_dir("layers"));
    must(sti_store_open(path, &s, &e), &e);
    assert_null(sti_store_find(&s, "layers.0.map_q"));
    assert_null(sti_store_find(&s, "layers.0.lora.q.a"));
    assert_non_null(sti_store_find(&s, "layers.1.map_q"));
    assert_non_null(sti_store_find(&s, "layers.2.lora.q.b"));
    sti_store_close(&s);
}

/* ---- Interruption -------------------------------------------------------- */

/* Stopped after every single step and gone on with: the same bits. The last step leaves
 * nothing to go on with, so it is not stopped at. */
static void stopped_at_every_step(void **state)
{
    (void)state;
    run r;
    size_t n;
    setup(&r, "still", 0, 4);
    r.p.data = data + 1;
    r.p.held_out = 0.2;
    train(&r, "whole");
    for (int i = 0; i < 8; i++) {
        setup(&r, "still", 0, 4);
        r.p.data = data + 1;
        r.p.held_out = 0.2;
        r.p.resume = i > 0;
        r.stop_after = 1;
        const still_status st = go(&r, "stopped");
        assert_int_equal(st, i < 7 ? STILL_E_CANCELLED : STILL_OK);
        assert_int_equal(r.n, 1);
        if (i < 7) assert_non_null(strstr(r.err.text, "stopped after step"));
    }
    assert_true(same_file(in_dir("whole"), in_dir("stopped"), STI_ADAPTER_TENSORS));
    assert_int_equal(count_files(in_dir("stopped"), "checkpoint"), 0);
    char *log = read_all(in_dir("stopped"), "train.jsonl", &n);
    int lines = 0;
    for (const char *c = log; *c; c++) lines += *c == '\n';
    assert_int_equal(lines, 8);
    free(log);
    r.p.resume = true;
    assert_int_equal(go(&r, "stopped"), STILL_E_ARG);
    assert_non_null(strstr(r.err.text, "the run is finished"));
}

static bool stop_reading(void *user, uint64_t done, uint64_t total)
{
    (void)user, (void)done, (void)total;
    return false;
}

/* Nothing has begun when reading is cancelled, so nothing is there. */
static void cancelled_before_it_began(void **state)
{
    (void)state;
    run r;
    setup(&r, "still", 0, 4);
    r.p.cache_dir = in_dir("other-cache");
    r.p.reading = stop_reading;
    assert_int_equal(go(&r, "cancelled"), STILL_E_CANCELLED);
    assert_int_equal(access(in_dir("cancelled"), F_OK), -1);
}

/* Steps that end in no number: the layer is named, the checkpoint before is kept and
 * can be gone on with, and no step is told that did not happen. */
static void divergence(void **state)
{
    (void)state;
    static const struct {
        int stage;
        double lr;
        const char *text;
    } c[] = {{1, 1e39, "stage 1, step 0: the step makes 'layers.0."},
             {1, 1e38, "stage 1, step 1: what layer 0 computes is not a number"},
             {2, 1e39, "stage 2, step 0: the step makes 'layers.0."},
             {2, 1e38, "stage 2, step 1: what layer 0 computes is not a number"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        run r;
        still_error first;
        size_t n, k;
        setup(&r, "still", c[i].stage, 6);
        r.p.lr[c[i].stage] = c[i].lr;
        r.p.save_every = 1;
        remove_all(in_dir("nan"));
        assert_int_equal(go(&r, "nan"), STILL_E_NUMERIC);
        if (!strstr(r.err.text, c[i].text)) fail_msg("%s", r.err.text);
        assert_non_null(strstr(r.err.text, "the last checkpoint is good"));
        first = r.err;
        char *before = read_all(in_dir("nan"), STI_CHECKPOINT, &n);
        r.p.resume = true;
        assert_int_equal(go(&r, "nan"), STILL_E_NUMERIC);
        assert_string_equal(r.err.text, first.text);
        char *after = read_all(in_dir("nan"), STI_CHECKPOINT, &k);
        assert_true(n == k && memcmp(before, after, n) == 0);
        assert_int_equal(count_files(in_dir("nan"), "tmp"), 0);
        free(before);
        free(after);
    }
}

/* A limit on the size of files stands for a full disk: the write fails, the checkpoint
 * before it stays, nothing else is left, and with room again the run ends as ever. */
static void full_disk(void **state)
{
    (void)state;
    run r;
    size_t n, k;
    struct rlimit was, tight;
    setup(&r, "still", 0, 4);
    train(&r, "whole");
    setup(&r, "still", 0, 4);
    r.stop_after = 2;
    assert_int_equal(go(&r, "full"), STILL_E_CANCELLED);
    char *before = read_all(in_dir("full"), STI_CHECKPOINT, &n);

    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    tight = was;
    tight.rlim_cur = n / 2;
    r.p.resume = true;
    r.p.save_every = 1;
    r.stop_after = 0;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    const still_status st = go(&r, "full");
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    assert_int_equal(st, STILL_E_IO);
    assert_non_null(strstr(r.err.text, "cannot write"));

    char *after = read_all(in_dir("full"), STI_CHECKPOINT, &k);
    assert_true(n == k && memcmp(before, after, n) == 0);
    assert_int_equal(count_files(in_dir("full"), "tmp"), 0);
    free(before);
    free(after);
    must(go(&r, "full"), &r.err);
    assert_true(same_file(in_dir("whole"), in_dir("full"), STI_ADAPTER_TENSORS));
}

static void touch(const char *folder, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fclose(f);
}

/* What killed writers left is removed; what looks alike is not ours and stays. */
static void sweep(void **state)
{
    (void)state;
    const char *folder = in_dir("sweep");
    assert_int_equal(mkdir(folder, 0777), 0);
    const char *const ours[] = {"checkpoint.safetensors.12.0.tmp", "train.jsonl.7.tmp",
                                "adapter.safetensors.1.99.tmp", "still.json.3.tmp"};
    const char *const others[] = {
        "checkpoint.safetensors", "checkpoint.safetensors.tmp",
        "checkpoint.safetensors.mine.tmp", "notes.12.tmp", "train.jsonl.7.tmp.txt"};
    for (size_t i = 0; i < 4; i++) touch(folder, ours[i]);
    for (size_t i = 0; i < 5; i++) touch(folder, others[i]);
    sti_checkpoint_sweep(folder);
    assert_int_equal(count_files(folder, ""), 5);
    sti_checkpoint_sweep("/nonexistent");
}

/* ---- Refusals ------------------------------------------------------------ */

static void refuses(run *r, still_status want, const char *text)
{
    remove_all(in_dir("refused"));
    assert_int_equal(go(r, "refused"), want);
    if (!strstr(r->err.text, text)) fail_msg("%s", r->err.text);
    assert_int_equal(access(in_dir("refused"), F_OK), -1);
}

static void refusals(void **state)
{
    (void)state;
    run r;
    setup(&r, "swa", 1, 4);
    refuses(&r, STILL_E_ARG, "method swa has nothing to train in stage 1");
    setup(&r, "supra", 1, 4);
    r.p.match_weights = true;
    refuses(&r, STILL_E_ARG, "has no attention weights");
    setup(&r, "still", 2, 4);
    r.p.lr_scale[STILL_GROUP_LORA] = -1;
    r.p.freeze_maps = true;
    refuses(&r, STILL_E_ARG, "nothing to train in stage 2");
    setup(&r, "softmax", 0, 4);
    refuses(&r, STILL_E_ARG, "softmax is the teacher itself");
    setup(&r, "still", 0, 4);
    r.p.n_data = 0;
    refuses(&r, STILL_E_ARG, "no training data");
    setup(&r, "still", 0, 4);
    r.p.seq = 1 << 18;
    r.p.batch = 1;
    refuses(&r, STILL_E_FORMAT, "tokens, expected at least the 262144");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_method_learns),
        cmocka_unit_test(options_learn),
        cmocka_unit_test(accumulation),
        cmocka_unit_test(dropout_repeats),
        cmocka_unit_test(some_layers),
        cmocka_unit_test(stopped_at_every_step),
        cmocka_unit_test(cancelled_before_it_began),
        cmocka_unit_test(divergence),
        cmocka_unit_test(full_disk),
        cmocka_unit_test(sweep),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
