/* Training runs that do not go through at once: stopped after each step and gone on
 * with, from one stage to the next; what divergence, a full disk and a change of mind
 * leave behind. */
#include "../run.h"
#include "linearize_runs.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

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

/* A checkpoint with a byte that changed is refused by its name, wherever the byte is; as
 * it was, the run goes on. */
static void damaged_checkpoint(void **state)
{
    (void)state;
    run r;
    size_t n;
    char path[300];
    setup(&r, "still", 0, 4);
    r.stop_after = 2;
    assert_int_equal(go(&r, "damaged"), STILL_E_CANCELLED);
    char *bytes = read_all(in_dir("damaged"), STI_CHECKPOINT, &n);
    snprintf(path, sizeof path, "%s/%s", in_dir("damaged"), STI_CHECKPOINT);
    r.p.resume = true;
    for (size_t i = 0; i < n; i += i < 2000 ? 97 : n / 41) {
        FILE *f = fopen(path, "r+b");
        assert_non_null(f);
        fseek(f, (long)i, SEEK_SET);
        fputc((unsigned char)bytes[i] ^ 2, f);
        fclose(f);
        if (go(&r, "damaged") == STILL_OK) fail_msg("byte %zu may be another", i);
        assert_non_null(strstr(r.err.text, STI_CHECKPOINT));
        f = fopen(path, "r+b");
        assert_non_null(f);
        fseek(f, (long)i, SEEK_SET);
        fputc((unsigned char)bytes[i], f);
        fclose(f);
    }
    free(bytes);
    r.stop_after = 0;
    must(go(&r, "damaged"), &r.err);
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

/* ---- Between the stages -------------------------------------------------- */

/* The sum of |x| of a tensor of the checkpoint in a folder. */
static double size_in_checkpoint(const char *folder, const char *name)
{
    char path[512];
    still_error e;
    sti_store s = {0};
    double sum = 0;
    snprintf(path, sizeof path, "%s/" STI_CHECKPOINT, folder);
    must(sti_store_open(path, &s, &e), &e);
    const sti_tensor *t = sti_store_find(&s, name);
    assert_non_null(t);
    for (size_t i = 0; i < t->bytes / sizeof(float); i++)
        sum += fabs((double)((const float *)t->data)[i]);
    sti_store_close(&s);
    return sum;
}

typedef struct between {
    int looked;
    double first, second, value; /* moments and values that stage 2 began with */
} between;

/* At the first step of stage 2 the last checkpoint is the one that it began with. */
static bool look_at_start(void *user, const still_train_progress *p)
{
    between *b = user;
    if (p->stage == 2 && p->step == 1) {
        b->first = size_in_checkpoint(in_dir("stages"), "moment1");
        b->second = size_in_checkpoint(in_dir("stages"), "moment2");
        b->value = size_in_checkpoint(in_dir("stages"), "value");
        b->looked++;
    }
    return true;
}

/* Stage 2 has another loss, so that moments of stage 1 mean nothing to it: they are
 * zeros, and its losses are those of a run that begins from stage 1's adapter. */
static void stage2_starts_afresh(void **state)
{
    (void)state;
    run r;
    between b = {0};
    remove_all(in_dir("stages"));
    setup(&r, "still", 0, 3);
    r.p.out = in_dir("stages");
    r.p.each = look_at_start;
    r.p.user = &b;
    must(still_linearize(model, &r.p, &r.err), &r.err);
    assert_int_equal(b.looked, 1);
    assert_true(b.first == 0 && b.second == 0);
    assert_true(b.value > 0);

    setup(&r, "still", 0, 3);
    train(&r, "both");
    const run both = r;
    setup(&r, "still", 1, 3);
    train(&r, "first");
    const char *start = in_dir("first");
    setup(&r, "still", 2, 3);
    r.p.start = start;
    train(&r, "second");
    assert_int_equal(both.n, 6);
    for (int i = 0; i < 3; i++) /* all sequences, in another order: but for rounding */
        assert_true(fabs(r.step[i].loss - both.step[3 + i].loss) <= 1e-6);
}

/* Stage 2 goes on in the data where stage 1 ended: its first sequence is another one than
 * that of a run which begins with stage 2. */
static void stage2_goes_on_in_the_data(void **state)
{
    (void)state;
    run r;
    setup(&r, "still", 0, 1);
    r.p.batch = 1;
    r.p.tokens = SEQ;
    train(&r, "one-and-two");
    const run both = r;
    setup(&r, "still", 1, 1);
    r.p.batch = 1;
    r.p.tokens = SEQ;
    train(&r, "one");
    const char *start = in_dir("one");
    setup(&r, "still", 2, 1);
    r.p.batch = 1;
    r.p.tokens = SEQ;
    r.p.start = start;
    train(&r, "two");
    assert_int_equal(both.n, 2);
    assert_int_equal(r.n, 1);
    assert_true(fabs(r.step[0].loss - both.step[1].loss) > 1e-3);
}

RUN_TESTS_IN(set_up, tear_down, cmocka_unit_test(stopped_at_every_step),
             cmocka_unit_test(cancelled_before_it_began), cmocka_unit_test(divergence),
             cmocka_unit_test(damaged_checkpoint), cmocka_unit_test(full_disk),
             cmocka_unit_test(sweep), cmocka_unit_test(stage2_starts_afresh),
             cmocka_unit_test(stage2_goes_on_in_the_data))
