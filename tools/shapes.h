/* shapes.h - published model shapes that make-model can write. */
#ifndef TOOLS_SHAPES_H
#define TOOLS_SHAPES_H

#include <stddef.h>

typedef enum family { LLAMA, MISTRAL, QWEN2 } family;

typedef struct shape {
    const char *name;
    family arch;
    int layers, hidden, ffn, heads, kv_heads, head_dim, vocab, ctx;
    double theta, eps;
    int tied;
    double rope_factor; /* Llama 3.1 scaling (original length 8192); 0: none */
    int window;         /* sliding window; 0: none */
} shape;

static const shape SHAPES[] = {
    /* name, arch, layers, hidden, ffn, heads, kv, head, vocab, ctx, theta, eps, tied,
     * rope factor, window */
    {"smollm2-135m", LLAMA, 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, 1e-5, 1, 0, 0},
    {"smollm2-360m", LLAMA, 32, 960, 2560, 15, 5, 64, 49152, 8192, 1e5, 1e-5, 1, 0, 0},
    {"smollm2-1.7b", LLAMA, 24, 2048, 8192, 32, 32, 64, 49152, 8192, 1.3e5, 1e-5, 1, 0,
     0},
    {"llama3.2-1b", LLAMA, 16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, 1e-5, 1, 32,
     0},
    {"llama3.2-3b", LLAMA, 28, 3072, 8192, 24, 8, 128, 128256, 131072, 5e5, 1e-5, 1, 32,
     0},
    {"llama3-8b", LLAMA, 32, 4096, 14336, 32, 8, 128, 128256, 8192, 5e5, 1e-5, 0, 0, 0},
    {"llama3.1-8b", LLAMA, 32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, 1e-5, 0, 8,
     0},
    {"llama3-70b", LLAMA, 80, 8192, 28672, 64, 8, 128, 128256, 8192, 5e5, 1e-5, 0, 0,
     0},
    {"llama3.1-70b", LLAMA, 80, 8192, 28672, 64, 8, 128, 128256, 131072, 5e5, 1e-5, 0,
     8, 0},
    {"mistral-7b", MISTRAL, 32, 4096, 14336, 32, 8, 128, 32000, 32768, 1e4, 1e-5, 0, 0,
     4096},
    {"qwen2-0.5b", QWEN2, 24, 896, 4864, 14, 2, 64, 151936, 131072, 1e6, 1e-6, 1, 0, 0},
    {"qwen2-1.5b", QWEN2, 28, 1536, 8960, 12, 2, 128, 151936, 131072, 1e6, 1e-6, 1, 0,
     0},
    {"qwen2-7b", QWEN2, 28, 3584, 18944, 28, 4, 128, 152064, 131072, 1e6, 1e-6, 0, 0,
     0},
    {"tiny", LLAMA, 2, 256, 512, 4, 2, 64, 512, 2048, 1e4, 1e-5, 0, 0, 0},
};
enum { N_SHAPES = sizeof SHAPES / sizeof *SHAPES };

#endif
