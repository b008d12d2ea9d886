/* logprobs.c - still logprobs: how likely each id of a list is after those before it. */
#include <stdlib.h>

#include "base/mem.h"
#include "cli/ids.h"
#include "cli/run.h"

enum { IDS_MAX = 256 << 20 };

static int print_logprobs(const cli_options *o, const float *logprob, size_t n)
{
    if (!o->json) {
        for (size_t i = 0; i < n; i++) cli_print("%.6f\n", (double)logprob[i]);
        return CLI_OK;
    }
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++)
        sti_json_append(&list, sti_json_of_real((double)logprob[i]));
    return cli_print_json(json_pack("{s:o}", "logprobs", list));
}

static int score(const cli_options *o, still_model *m, const int32_t *ids, size_t n)
{
    still_error err;
    still_session *session = NULL;
    int64_t ctx = o->ctx ? o->ctx : (int64_t)n;
    if (n < 2) return cli_fail("%s: has %zu ids, at least 2 are needed", o->ids, n);
    if ((int64_t)n > ctx || n > INT32_MAX)
        return cli_fail("%s: has %zu ids, the context holds %lld: raise --ctx", o->ids,
                        n, (long long)ctx);
    float *logprob = sti_alloc(n, sizeof *logprob);
    if (!logprob) return cli_fail("out of memory: %zu ids", n);
    int status = cli_open_session(o, m, ctx, &session);
    if (status == CLI_OK &&
        still_session_logprobs(session, ids, (int)n, logprob, NULL, &err))
        status = cli_fail_error(&err);
    if (status == CLI_OK) status = print_logprobs(o, logprob, n - 1);
    still_session_free(session);
    free(logprob);
    return status;
}

int cli_cmd_logprobs(const cli_options *o)
{
    still_error err;
    still_model *m = NULL;
    char *text = NULL;
    int32_t *ids = NULL;
    size_t n;
    if (!o->ids) return cli_usage("logprobs", "'logprobs' needs --ids FILE");
    if (cli_read(o->ids, IDS_MAX, &text, &n, &err)) return cli_fail_error(&err);
    int status = cli_open_model(o, o->arg[0], &m);
    if (status == CLI_OK &&
        cli_parse_ids(text, still_model_get_info(m)->vocab, &ids, &n, &err))
        status = cli_fail_error(&err);
    if (status == CLI_OK) status = score(o, m, ids, n);
    still_model_free(m);
    free(text);
    free(ids);
    return status;
}
