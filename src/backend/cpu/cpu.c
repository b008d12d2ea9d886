/* cpu.c - the device of the cpu backend, and its row in the table of operators.
 *
 * The instruction set is chosen once, when the device is made: the widest the processor
 * has, or the one asked for. */
#include "backend/cpu/cpu.h"

#include <stdlib.h>
#include <string.h>

#include "backend/cpu/kernels.h"
#include "backend/host.h"
#include "base/named.h"

#if STI_CPU_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Instruction sets, the widest first; without kernels on other architectures. */
typedef struct isa {
    const char *name;
    const sti_cpu_kernels *k;
} isa;

static const isa isas[] = {
#if STI_CPU_X86
    {"amx", &sti_cpu_kernels_amx},
    {"avx512", &sti_cpu_kernels_avx512},
    {"avx2", &sti_cpu_kernels_avx2},
#else
    {"amx", NULL},
    {"avx512", NULL},
    {"avx2", NULL},
#endif
    {"portable", &sti_cpu_kernels_portable},
};
enum { N_ISAS = sizeof isas / sizeof *isas };

#if STI_CPU_X86
/* Whether there are tiles of bytes, and Linux lets this process use them: it wants to be
 * asked, since they make the registers of a thread 8 KB larger. */
static bool has_amx(void)
{
    enum { TILES_AND_INT8 = 3 << 24, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d = 0; /* gcc 12 and clang 14 have no names for these */
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (d & TILES_AND_INT8) == TILES_AND_INT8 &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

/* Whether this processor has what the kernels were compiled for. */
static bool can_run(const sti_cpu_kernels *k)
{
#if STI_CPU_X86
    __builtin_cpu_init();
    unsigned a, b, c = 0, d; /* clang 14 has no name for F16C */
    bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 =
        avx2 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    if (k == &sti_cpu_kernels_avx2) return avx2;
    if (k == &sti_cpu_kernels_avx512) return avx512;
    if (k == &sti_cpu_kernels_amx) return avx512 && has_amx();
#endif
    return k == &sti_cpu_kernels_portable;
}

/* Whether it adds beside its multiplications, see matmul_pairs_avx512.c. */
static bool adds_beside(void)
{
#if STI_CPU_X86
    __builtin_cpu_init();
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

/* asked NULL: the widest there is. */
static still_status choose_kernels(const char *asked, const sti_cpu_kernels **out,
                                   still_error *err)
{
    for (int i = 0; i < N_ISAS; i++) {
        const bool can = can_run(isas[i].k);
        if (asked ? strcmp(asked, isas[i].name) != 0 : !can) continue;
        if (!can)
            return sti_fail(err, STILL_E_UNSUPPORTED,
                            "instruction set '%s' is not on this processor", asked);
        *out = isas[i].k;
        return STILL_OK;
    }
    return sti_fail(err, STILL_E_ARG,
                    "instruction set '%s' is unknown, expected portable, avx2, "
                    "avx512 or amx",
                    asked);
}

static void dev_free(sti_dev *dev)
{
    if (!dev) return;
    sti_pool_free(dev->pool);
    sti_block_free(&dev->scratch);
    sti_cpu_arena_free(dev);
    free(dev);
}

static still_status dev_new(const sti_dev_params *p, sti_dev **out, still_error *err)
{
    *out = NULL;
    const sti_cpu_kernels *k = NULL;
    STI_TRY(choose_kernels(p->isa, &k, err));
    sti_dev *dev = sti_alloc(1, sizeof *dev);
    if (!dev) return sti_fail_memory(err, "cpu device", sizeof *dev);
    *dev = (sti_dev){.k = k,
                     .pairs = adds_beside(),
                     .max_k = p->max_k,
                     .heads = p->heads,
                     .kv_heads = p->kv_heads,
                     .head_dim = p->head_dim};
    still_status st = sti_pool_new(p->threads, &dev->pool, err);
    if (st != STILL_OK) {
        dev_free(dev);
        return st;
    }
    *out = dev;
    return STILL_OK;
}

static const char *dev_isa(const sti_dev *dev)
{
    for (int i = 0; i < N_ISAS; i++)
        if (isas[i].k == dev->k) return isas[i].name;
    return NULL;
}

static int dev_threads(const sti_dev *dev)
{
    return sti_pool_threads(dev->pool);
}

static size_t dev_bytes(const sti_dev *dev, int rows)
{
    const size_t need[] = {sti_cpu_matmul_scratch(dev, rows),
                           sti_cpu_attn_scratch(dev, rows),
                           sti_cpu_hybrid_scratch(dev, rows),
                           sti_cpu_linear_scratch(dev, rows), sti_cpu_ffn_scratch(dev)};
    size_t most = 0;
    for (size_t i = 0; i < sizeof need / sizeof *need; i++)
        if (need[i] > most) most = need[i];
    return most;
}

still_status sti_cpu_need_bytes(sti_dev *dev, size_t bytes, still_error *err)
{
    if (bytes <= dev->scratch.bytes) return STILL_OK;
    sti_block grown;
    if (!sti_block_new(&grown, bytes)) return sti_fail_memory(err, "scratch", bytes);
    sti_block_free(&dev->scratch);
    dev->scratch = grown;
    return STILL_OK;
}

still_status sti_cpu_need(sti_dev *dev, int rows, still_error *err)
{
    if (rows <= dev->rows) return STILL_OK;
    STI_TRY(sti_cpu_need_bytes(dev, dev_bytes(dev, rows), err));
    dev->rows = rows;
    return STILL_OK;
}

static size_t mem_peak(sti_dev *dev, bool restart)
{
    if (restart) {
        sti_block_free(&dev->scratch);
        dev->rows = 0;
        dev->hybrid_fixed = dev->hybrid_row = dev->linear_fixed = dev->linear_row = 0;
    }
    return sti_host_mem_peak(dev, restart);
}

const sti_backend sti_backend_cpu = {
    .name = "cpu",
    .cache = STI_F16,
    STI_HOST_MEMORY,
    .mem_peak = mem_peak,
    STI_NAMED_4(, dev_new, dev_free, dev_isa, dev_threads),
    .dev_reserve = sti_cpu_need,
    .dev_bytes = dev_bytes,
    STI_NAMED_3(sti_cpu_, weight_new, weight_free, weight_bytes),
    STI_NAMED_4(sti_cpu_, matmul, embed, rmsnorm, rope),
    STI_NAMED_2(sti_cpu_, swiglu, ffn_forward),
    .scale_columns = sti_host_scale_columns,
    STI_NAMED_3(sti_cpu_, matmul_lora, ffn_train, ffn_back),
    STI_NAMED_2(sti_cpu_, softmax_attn, logprob),
    STI_NAMED_2(sti_cpu_, matmul_back, matmul_grad),
    STI_NAMED_2(sti_cpu_, rmsnorm_back, swiglu_back),
    STI_NAMED_3(sti_cpu_, loss, adam, sum_squares),
    STI_HOST_TRAINING,
    .state_kv = 0, /* as the session's cache */
    .state_real = sizeof(float),
    STI_NAMED_4(sti_cpu_, hybrid_reserve, hybrid_bytes, hybrid, hybrid_route),
    STI_NAMED_3(sti_cpu_, hybrid_parallel, hybrid_backward, hybrid_match),
    STI_NAMED_4(sti_cpu_, linear_reserve, linear_bytes, linear, linear_backward),
};
