/* inspect.c - still inspect: a model's architecture and where its memory goes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/run.h"

enum { MOST_TYPES = 32 };

/* Tensors of one type, together. */
typedef struct type_sum {
    const char *dtype;
    size_t count;
    uint64_t bytes;
} type_sum;

static int sum_types(const still_model *m, type_sum sum[MOST_TYPES])
{
    int n = 0;
    still_tensor_info t;
    for (size_t i = 0; i < still_model_tensor_count(m); i++) {
        if (!still_model_tensor(m, i, &t)) continue;
        int k = 0;
        while (k < n && strcmp(sum[k].dtype, t.dtype) != 0) k++;
        if (k == MOST_TYPES) continue;
        if (k == n) sum[n++] = (type_sum){.dtype = t.dtype};
        sum[k].count++;
        sum[k].bytes += t.bytes;
    }
    return n;
}

static json_t *bill_object(const still_bill *b, int64_t ctx)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "ctx",
                     (json_int_t)ctx, "weights_mapped", (json_int_t)b->weights_mapped,
                     "weights_resident", (json_int_t)b->weights_resident, "cache",
                     (json_int_t)b->cache, "rollback", (json_int_t)b->rollback,
                     "scratch", (json_int_t)b->scratch, "runtime",
                     (json_int_t)b->runtime, "total", (json_int_t)b->total, "device",
                     (json_int_t)b->device);
}

static json_t *tensor_list(const still_model *m)
{
    json_t *list = json_array();
    still_tensor_info t;
    for (size_t i = 0; i < still_model_tensor_count(m); i++) {
        if (!still_model_tensor(m, i, &t)) continue;
        json_t *shape = json_array();
        for (int d = 0; d < t.n_dims; d++)
            sti_json_append(&shape, json_integer(t.dim[d]));
        sti_json_append(&list, json_pack("{s:o, s:s, s:o, s:I}", "name",
                                         cli_json_text(t.name, strlen(t.name)), "dtype",
                                         t.dtype, "shape", shape, "bytes",
                                         (json_int_t)t.bytes));
    }
    return list;
}

/* Memory for the same context under softmax and under the chosen method. */
typedef struct bills {
    int64_t ctx;
    still_method method;
    bool two; /* the method is not softmax */
    still_bill softmax, of_method;
} bills;

static int print_object(const cli_options *o, const still_model *m, const bills *b)
{
    const still_model_info *i = still_model_get_info(m);
    char text[160];
    type_sum sum[MOST_TYPES];
    int n = sum_types(m, sum);
    json_t *types = json_object();
    for (int k = 0; k < n; k++)
        sti_json_set(&types, sum[k].dtype,
                     json_pack("{s:I, s:I}", "tensors", (json_int_t)sum[k].count,
                               "bytes", (json_int_t)sum[k].bytes));
    const char *name = i->name ? i->name : "";
    json_t *object =
        json_pack("{s:o, s:o, s:s, s:s, s:s?, s:i, s:I, s:I}", "path",
                  cli_json_text(i->path, strlen(i->path)), "name",
                  cli_json_text(name, strlen(name)), "arch", i->arch, "backend",
                  i->backend, "isa", i->isa, "threads", i->threads, "params",
                  (json_int_t)i->params, "file_bytes", (json_int_t)i->file_bytes);
    json_t *shape =
        json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:b}", "layers",
                  i->layers, "hidden", i->hidden, "ffn", i->ffn, "heads", i->heads,
                  "kv_heads", i->kv_heads, "head_dim", i->head_dim, "vocab", i->vocab,
                  "ctx_train", i->ctx_train, "sliding_window", i->sliding_window,
                  "rope_theta", i->rope_theta, "tied", (int)i->tied);
    sti_json_merge(&object, shape);
    sti_json_set(&object, "tensors",
                 json_integer((json_int_t)still_model_tensor_count(m)));
    sti_json_set(&object, "dtypes", types);
    sti_json_set(&object, "method",
                 json_string(cli_describe_method(&b->method, text, sizeof text)));
    if (i->adapter)
        sti_json_set(&object, "adapter", cli_json_text(i->adapter, strlen(i->adapter)));
    if (i->merged) sti_json_set(&object, "merged", json_string(i->merged));
    sti_json_set(&object, "memory", bill_object(&b->softmax, b->ctx));
    if (b->two) {
        json_t *of_method = bill_object(&b->of_method, b->ctx);
        sti_json_set(&of_method, "method", json_string(b->method.name));
        sti_json_set(&object, "memory_method", of_method);
    }
    if (o->tensors) sti_json_set(&object, "tensor_list", tensor_list(m));
    return cli_print_json(object);
}

static void row(const bills *b, const char *name, uint64_t softmax, uint64_t of_method,
                const char *remark)
{
    char one[32], other[32] = "";
    if (b->two) cli_bytes(other, of_method);
    cli_print("  %-18s %10s", name, cli_bytes(one, softmax));
    if (b->two) cli_print(" %10s", other);
    cli_print("  %s\n", remark);
}

static void print_model(const still_model_info *i, const still_method *method)
{
    char size[32], name[256], text[160];
    cli_print("%s\n",
              cli_line(name, sizeof name, i->name && *i->name ? i->name : i->path));
    cli_print("  %-18s %s\n", "file", i->path);
    cli_print("  %-18s %s, %.1f M weights, %s\n", "architecture", i->arch,
              (double)i->params / 1e6, cli_bytes(size, i->file_bytes));
    cli_print("  %-18s %d layers, hidden %d, ffn %d\n", "shape", i->layers, i->hidden,
              i->ffn);
    cli_print("  %-18s %d heads, %d kv heads, head size %d", "attention", i->heads,
              i->kv_heads, i->head_dim);
    if (i->sliding_window) cli_print(", window %d", i->sliding_window);
    cli_print("\n  %-18s %d tokens%s\n", "vocabulary", i->vocab,
              i->tied ? ", output tied to the embedding" : "");
    cli_print("  %-18s %d tokens, RoPE base %g\n", "trained context", i->ctx_train,
              i->rope_theta);
    if (i->adapter) cli_print("  %-18s %s\n", "adapter", i->adapter);
    cli_print("  %-18s %s\n", "method", cli_describe_method(method, text, sizeof text));
    if (i->merged)
        cli_print("  %-18s merged into the projections, which are %s\n", "LoRA",
                  i->merged);
}

static void print_tensors(const still_model *m, bool all)
{
    char size[32], name[256];
    type_sum sum[MOST_TYPES];
    int n = sum_types(m, sum);
    cli_print("\nTensors: %zu\n", still_model_tensor_count(m));
    for (int k = 0; k < n; k++)
        cli_print("  %-18s %10s  in %zu tensors\n", sum[k].dtype,
                  cli_bytes(size, sum[k].bytes), sum[k].count);
    if (!all) return;
    cli_print("\n");
    still_tensor_info t;
    for (size_t i = 0; i < still_model_tensor_count(m); i++) {
        if (!still_model_tensor(m, i, &t)) continue;
        cli_print("  %-6s %10s  %s [", t.dtype, cli_bytes(size, t.bytes),
                  cli_line(name, sizeof name, t.name));
        for (int d = 0; d < t.n_dims; d++)
            cli_print("%s%lld", d ? ", " : "", (long long)t.dim[d]);
        cli_print("]\n");
    }
}

static void print_bills(const still_model *m, const bills *b)
{
    const still_model_info *i = still_model_get_info(m);
    const still_bill *s = &b->softmax, *t = &b->of_method;
    cli_print("\nMemory at context %lld, %s%s%s backend, %d thread%s:\n",
              (long long)b->ctx, i->backend, i->isa ? " " : "", i->isa ? i->isa : "",
              i->threads, i->threads == 1 ? "" : "s");
    if (b->two) cli_print("  %-18s %10s %10s\n", "", "softmax", b->method.name);
    row(b, "weights, mapped", s->weights_mapped, t->weights_mapped,
        "used in place, shared with the file cache");
    row(b, "weights, repacked", s->weights_resident, t->weights_resident,
        "copies in the backend's own layout");
    row(b, "attention", s->cache, t->cache,
        b->two ? "what is kept of the past" : "keys and values of every token");
    if (t->rollback)
        row(b, "rollback", s->rollback, t->rollback, "states it can go back to");
    row(b, "scratch", s->scratch, t->scratch, "activations and logits");
    row(b, "runtime", s->runtime, t->runtime, "tokenizer, tables, code");
    row(b, "total", s->total, t->total, "");
    if (s->device)
        row(b, "of it on the GPU", s->device, t->device,
            "besides the driver's own, about 0.5 GiB");
}

static int make_bills(const cli_options *o, still_model *m, bills *b)
{
    still_error err;
    still_method softmax;
    int status = cli_read_method(o, m, &b->method);
    if (status != CLI_OK) return status;
    if (still_method_init(&softmax, "softmax", 0, &err)) return cli_fail_error(&err);
    b->ctx = o->ctx ? o->ctx : still_model_get_info(m)->ctx_train;
    b->two = strcmp(b->method.name, softmax.name) != 0;
    still_session_params params = cli_session_params(o, &softmax, b->ctx);
    params.rollback = 0;
    if (still_model_bill(m, &params, &b->softmax, &err)) return cli_fail_error(&err);
    params.method = &b->method;
    params.rollback = (int)o->rollback;
    if (still_model_bill(m, &params, &b->of_method, &err)) return cli_fail_error(&err);
    return CLI_OK;
}

int cli_cmd_inspect(const cli_options *o)
{
    still_model *m;
    bills b;
    int status = cli_open_model(o, o->arg[0], &m);
    if (status != CLI_OK) return status;
    status = make_bills(o, m, &b);
    if (status == CLI_OK && o->json) {
        status = print_object(o, m, &b);
    } else if (status == CLI_OK) {
        print_model(still_model_get_info(m), &b.method);
        print_tensors(m, o->tensors);
        print_bills(m, &b);
    }
    still_model_free(m);
    return status;
}
