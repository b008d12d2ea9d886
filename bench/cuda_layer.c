/* cuda_layer.c - one layer on the GPU: its attention by method, and its products.
 *
 *     cuda_layer [--rows N] [--only prefill|decode|products] [--json FILE]
 *
 * Times the operators as the model calls them, by CUDA events, after runs that do not
 * count: the median of 10 and more, fewer of what takes long.
 *
 *   prefill    N tokens of one sequence in pieces of --rows, the state carried from one
 *              to the next; N = 1K..128K (softmax to 64K). Llama-3.1-8B: 32 query
 *              heads, 8 kv heads, size 128.
 *   decode     one token for each of a batch of sequences at full state: in a pass,
 *              which is captured as a graph and replayed, and outside of one; for
 *              methods with a window also the step that begins a chunk. A pass goes
 *              over as many layers as it takes to exceed the L2 cache, since a model's
 *              weights pass through it between two layers; the figure is one layer's
 *              share.
 *   products   q, k, v and attention's gate, output, feed-forward of one layer,
 *              M rows; the most rows also many times in a row. */
#include "base/process.h"
#include "cuda_layer_hybrid.h"
#include "cuda_layer_products.h"
#include "cuda_layer_softmax.h"

static void time_prefill(bench *b)
{
    open_inputs(b, &LLAMA, b->rows);
    prefill_hybrid(b, "still");
    prefill_hybrid(b, "lolcats");
    prefill_hybrid(b, "swa");
    prefill_softmax(b);
    close_inputs(b);
}

static void time_decode(bench *b)
{
    static const char *const methods[] = {"still", "lolcats", "swa"};
    const int rows = b->rows;
    b->rows = 2053; /* states are filled in one piece */
    open_inputs(b, &LLAMA, b->rows);
    for (int i = 0; i < 3; i++) decode_hybrid(b, methods[i], 12);
    decode_softmax(b, 12, 65536);
    close_inputs(b);
    open_inputs(b, &SMOL, b->rows);
    for (int batch = 1; batch <= 256; batch *= 256) decode_hybrid(b, "still", batch);
    decode_softmax(b, 256, 4096);
    close_inputs(b);
    b->rows = rows;
}

int main(int argc, char **argv)
{
    bench b = {.be = sti_backend_find("cuda"), .rows = 8192, .d = LLAMA};
    const char *only = "", *json = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--rows") == 0 && i + 1 < argc)
            b.rows = atoi(argv[++i]);
        else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc)
            only = argv[++i];
        else if (strcmp(argv[i], "--json") == 0 && i + 1 < argc)
            json = argv[++i];
        else
            b.rows = 0;
    }
    if (b.rows < 1 || !b.be) {
        fputs("usage: cuda_layer [--rows N] [--only prefill|decode|products] "
              "[--json FILE]\n",
              stderr);
        return 2;
    }
    still_error e;
    int l2 = 0;
    const double begun = sti_now();
    must(b.be->dev_new(&(sti_dev_params){.max_k = 14336,
                                         .heads = LLAMA.H,
                                         .kv_heads = LLAMA.G,
                                         .head_dim = LLAMA.D},
                       &b.dev, &e),
         &e);
    check(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, b.dev->ordinal));
    b.l2 = (size_t)l2;
    check(cudaEventCreate(&b.start));
    check(cudaEventCreate(&b.stop));
    printf("%s, L2 %.0f MB; one layer, medians, pieces of %d rows\n\n",
           b.be->dev_isa(b.dev), l2 / 1e6, b.rows);
    printf("| shape | what | how | tokens | batch | time | runs | rate |\n"
           "|---|---|---|---:|---:|---:|---:|---:|\n");
    if (!*only || strcmp(only, "prefill") == 0) time_prefill(&b);
    if (!*only || strcmp(only, "decode") == 0) time_decode(&b);
    b.d = LLAMA;
    if (!*only || strcmp(only, "products") == 0) time_products(&b);
    fprintf(stderr, "%.0f s in all\n", sti_now() - begun);
    FILE *f = json ? fopen(json, "w") : stdout;
    if (!json) putchar('\n');
    if (!f || fwrite(b.json, 1, b.json_used, f) != b.json_used) {
        fprintf(stderr, "cuda_layer: %s cannot be written\n", json ? json : "stdout");
        return 1;
    }
    if (json) fclose(f);
    (void)cudaEventDestroy(b.start);
    (void)cudaEventDestroy(b.stop);
    b.be->dev_free(b.dev);
    return 0;
}
