/* bench_model.c - times prefill and decode of a model; prints one JSON object a line.
 *
 * Sees the library as a user does (still.h). A job is
 *     prefill:N     N tokens into an empty session, one call
 *     decode:N@D    N tokens one by one into a session that already holds D
 * and only the calls of still_session_feed are timed: no sampling, no text. Jobs come from
 * the command line, each repeated and reported by its median, or one by one from standard
 * input (job "-"), so that another program can alternate two tools. */
#include <inttypes.h>

#include "bench.h"

enum { MAX_REPEAT = 101, MAX_JOBS = 64 };

typedef struct bench {
    still_session *session;
    int vocab;
    int32_t *ids; /* [n_ids], fed from the front again when they run out */
    int n_ids;
} bench;

static const char usage[] =
    "usage: bench_model MODEL [--threads N] [--ctx N] [--ids FILE] [--repeat R]\n"
    "                   [--method NAME [--chunk C] [--cap M] | --adapter DIR] [--isa "
    "I]\n"
    "                   JOB...\n"
    "  JOB        prefill:N, decode:N@DEPTH, or - to read jobs from standard input\n"
    "  --ids      token ids to feed, separated by spaces or commas\n"
    "  --adapter  of a model that linearize made; with its own method\n"
    "  --repeat   runs of each job after one that is not counted (default 5)\n";

/* A number in [lo, 2^24] at s; *end is behind it. */
static int parse_int(const char *s, const char **end, int lo, int *out)
{
    char *stop;
    errno = 0;
    long v = strtol(s, &stop, 10);
    if (stop == s || errno || v < lo || v > 1 << 24) return -1;
    *out = (int)v;
    *end = stop;
    return 0;
}

/* The numbers in a file, whatever separates them: a JSON list works. */
static still_status read_ids(const char *path, bench *b, still_error *err)
{
    char *text = NULL;
    size_t n;
    still_status st = still_text_read(path, &text, &n, err);
    if (st) return st;
    b->ids = malloc((n / 2 + 1) * sizeof *b->ids); /* an id and a separator: 2 bytes */
    for (const char *p = text; b->ids && *(p += strcspn(p, "0123456789"));) {
        int id = 0;
        if (parse_int(p, &p, 0, &id) || id >= b->vocab) break;
        b->ids[b->n_ids++] = id;
    }
    free(text);
    return STILL_OK;
}

/* Without --ids: a fixed choice of tokens from the whole vocabulary. */
static void make_ids(bench *b)
{
    int n = 1021;
    b->ids = malloc((size_t)n * sizeof *b->ids);
    for (int i = 0; b->ids && i < n; i++)
        b->ids[b->n_ids++] =
            (int32_t)((7919ULL * (unsigned)i + 17) % (unsigned)b->vocab);
}

/* Feeds ids [from, from + n), wrapping around, in calls of at most `step`. */
static still_status feed(bench *b, int from, int n, int step, still_error *err)
{
    for (int done = 0; done < n;) {
        int at = (from + done) % b->n_ids;
        int take = n - done < step ? n - done : step;
        if (take > b->n_ids - at) take = b->n_ids - at;
        still_status st = still_session_feed(b->session, b->ids + at, take, err);
        if (st) return st;
        done += take;
    }
    return STILL_OK;
}

static int top_of(const bench *b)
{
    const float *logits = still_session_logits(b->session);
    int best = 0;
    for (int i = 1; i < b->vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* Runs one job `repeat` times (after one uncounted run if repeat > 1) and prints it. */
static int run(bench *b, const char *job, int repeat)
{
    int n = 0, depth = 0;
    const char *end = "?";
    bool prefill = strncmp(job, "prefill:", 8) == 0;
    bool decode = strncmp(job, "decode:", 7) == 0;
    if (prefill) {
        if (parse_int(job + 8, &end, 1, &n)) end = "?";
    } else if (decode) {
        if (parse_int(job + 7, &end, 1, &n)) end = "?";
        if (*end == '@' && parse_int(end + 1, &end, 0, &depth)) end = "?";
    }
    if (*end) {
        fprintf(stderr, "bench_model: job '%s' is not prefill:N or decode:N@DEPTH\n",
                job);
        return 2;
    }

    double seconds[MAX_REPEAT] = {0};
    still_error err;
    still_snapshot *filled = NULL; /* the session at `depth`, fed once */
    still_session_reset(b->session);
    still_status st = feed(b, 0, depth, depth, &err);
    if (!st && repeat > 1) st = still_session_snapshot(b->session, &filled, &err);
    for (int r = repeat > 1 ? -1 : 0; r < repeat && !st; r++) {
        if (filled) st = still_session_restore(b->session, filled, &err);
        double start = now();
        if (!st) st = feed(b, depth, n, prefill ? n : 1, &err);
        if (r >= 0) seconds[r] = now() - start;
    }
    still_snapshot_free(filled);
    if (st) {
        fprintf(stderr, "bench_model: %s: %s\n", job, err.text);
        return 1;
    }
    sort_times(seconds, repeat);
    double mid = seconds[repeat / 2];
    printf("{\"job\":\"%s\",\"tokens\":%d,\"depth\":%d,\"runs\":%d,\"seconds\":%.6f,"
           "\"tokens_per_s\":%.2f,\"slowest\":%.2f,\"fastest\":%.2f,\"top\":%d,"
           "\"peak_rss_bytes\":%" PRIu64 "}\n",
           job, n, depth, repeat, mid, n / mid, n / seconds[repeat - 1], n / seconds[0],
           top_of(b), peak_rss());
    fflush(stdout);
    return 0;
}

static int run_stdin(bench *b)
{
    char job[128];
    while (fgets(job, sizeof job, stdin)) {
        job[strcspn(job, "\n")] = 0;
        int status = run(b, job, 1);
        if (status) return status;
    }
    return 0;
}

static int open_and_run(const char *path, const still_model_params *mp,
                        const still_session_params *sp, const char *ids_path,
                        char **jobs, int n_jobs, int repeat)
{
    still_model *m = NULL;
    bench b = {0};
    still_error err;
    int status = 1;
    double start = now();
    if (still_model_open(path, mp, &m, &err) ||
        still_session_new(m, sp, &b.session, &err)) {
        fprintf(stderr, "bench_model: %s\n", err.text);
        goto out;
    }
    double opened = now() - start;
    const still_model_info *info = still_model_get_info(m);
    b.vocab = info->vocab;
    if (!ids_path)
        make_ids(&b);
    else if (read_ids(ids_path, &b, &err)) {
        fprintf(stderr, "bench_model: %s\n", err.text);
        goto out;
    }
    if (b.n_ids == 0) {
        fprintf(stderr, "bench_model: no token ids below %d to feed\n", b.vocab);
        goto out;
    }
    printf("{\"open_seconds\":%.4f,\"backend\":\"%s\",\"isa\":\"%s\",\"threads\":%d,"
           "\"ctx\":%d,\"vocab\":%d}\n",
           opened, info->backend, info->isa ? info->isa : "", info->threads,
           still_session_limit(b.session), b.vocab);
    fflush(stdout);
    status = 0;
    for (int i = 0; i < n_jobs && !status; i++)
        status = strcmp(jobs[i], "-") ? run(&b, jobs[i], repeat) : run_stdin(&b);
out:
    free(b.ids);
    still_session_free(b.session);
    still_model_free(m);
    return status;
}

int main(int argc, char **argv)
{
    still_model_params mp = {.size = sizeof mp};
    still_session_params sp = {.size = sizeof sp};
    const char *ids_path = NULL, *path = NULL, *method = "softmax";
    char *jobs[MAX_JOBS];
    int n_jobs = 0, repeat = 5, chunk = 0, cap = -1;

    for (int i = 1; i < argc; i++) {
        const char *end = "";
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        int bad = 0;
        if (strcmp(argv[i], "--threads") == 0 && ++i)
            bad = parse_int(value, &end, 1, &mp.threads);
        else if (strcmp(argv[i], "--ctx") == 0 && ++i)
            bad = parse_int(value, &end, 1, &sp.ctx);
        else if (strcmp(argv[i], "--repeat") == 0 && ++i)
            bad = parse_int(value, &end, 1, &repeat) || repeat > MAX_REPEAT;
        else if (strcmp(argv[i], "--chunk") == 0 && ++i)
            bad = parse_int(value, &end, 1, &chunk);
        else if (strcmp(argv[i], "--cap") == 0 && ++i)
            bad = parse_int(value, &end, 0, &cap);
        else if (strcmp(argv[i], "--method") == 0 && ++i)
            method = value;
        else if (strcmp(argv[i], "--adapter") == 0 && ++i)
            mp.adapter = value;
        else if (strcmp(argv[i], "--ids") == 0 && ++i)
            ids_path = value;
        else if (strcmp(argv[i], "--backend") == 0 && ++i)
            mp.backend = value;
        else if (strcmp(argv[i], "--isa") == 0 && ++i)
            mp.isa = value;
        else if (strncmp(argv[i], "--", 2) == 0)
            bad = 1;
        else if (!path)
            path = argv[i];
        else if (n_jobs < MAX_JOBS)
            jobs[n_jobs++] = argv[i];
        else
            bad = 1;
        if (bad || *end || i >= argc) {
            fprintf(stderr, "bench_model: cannot use '%s'\n%s",
                    i < argc ? argv[i] : argv[argc - 1], usage);
            return 2;
        }
    }
    if (!path || n_jobs == 0) {
        fputs(usage, stderr);
        return 2;
    }
    still_method how;
    still_error err;
    if (still_method_init(&how, method, chunk, &err)) {
        fprintf(stderr, "bench_model: %s\n", err.text);
        return 2;
    }
    if (cap >= 0) how.cap = cap;
    if (!mp.adapter) sp.method = &how;
    return open_and_run(path, &mp, &sp, ids_path, jobs, n_jobs, repeat);
}
