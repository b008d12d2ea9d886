/* device.c - a GPU, its memory, and the backend's row in the table of operators. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/dense/kernels.h"
#include "backend/cuda/ranks.h"
#include "backend/cuda/softmax/softmax.h"
#include "backend/cuda/train/kernels.h"

#ifndef STI_HAVE_NCCL
#define STI_HAVE_NCCL 0
#endif

enum { LT_WORKSPACE = 32 << 20, HEAD_ROWS = 256, OLDEST_MAJOR = 8 };

/* ---- Errors -------------------------------------------------------------- */

still_status sti_cuda_check(cudaError_t e, const char *what, still_error *err)
{
    if (e == cudaSuccess) return STILL_OK;
    (void)cudaGetLastError(); /* errors that do not stick are forgotten here */
    return sti_fail(err, e == cudaErrorMemoryAllocation ? STILL_E_MEMORY : STILL_E_IO,
                    "cuda: %s: %s", what, cudaGetErrorString(e));
}

still_status sti_cublas_check(cublasStatus_t e, const char *what, still_error *err)
{
    if (e == CUBLAS_STATUS_SUCCESS) return STILL_OK;
    return sti_fail(err, STILL_E_IO, "cuda: %s: %s", what, cublasLtGetStatusString(e));
}

/* ---- Memory -------------------------------------------------------------- */

/* Blocks of a pool begin at multiples of this. */
enum { POOL_STEP = 512 };

static still_status no_memory(const sti_dev *dev, size_t bytes, still_error *err)
{
    size_t left = 0, all = 0;
    (void)cudaGetLastError();
    (void)cudaMemGetInfo(&left, &all);
    if (dev->limit && bytes > dev->limit - dev->used)
        return sti_fail(
            err, STILL_E_MEMORY,
            "cuda: %.3f GB more of GPU memory are needed and %.3f of the "
            "%.3f GB of --gpu-memory are left: use a smaller context, cap or "
            "batch, fewer sessions, or more memory",
            (double)bytes / 1e9, (double)(dev->limit - dev->used) / 1e9,
            (double)dev->limit / 1e9);
    return sti_fail(err, STILL_E_MEMORY,
                    "cuda: %.2f GB of GPU memory are needed and %.2f of %.2f GB are "
                    "free: use a smaller context or batch, or --backend cpu",
                    (double)bytes / 1e9, (double)left / 1e9, (double)all / 1e9);
}

/* What a block of so many bytes counts for. */
static size_t counted(size_t bytes)
{
    return bytes > SIZE_MAX - POOL_STEP ? bytes : sti_cuda_round_up(bytes, POOL_STEP);
}

still_status sti_cuda_mem_new(sti_dev *dev, size_t bytes, sti_block *out,
                              still_error *err)
{
    *out = (sti_block){0};
    void *p = NULL;
    if (bytes == 0) bytes = 1;
    if (dev->limit && counted(bytes) > dev->limit - dev->used)
        return no_memory(dev, bytes, err);
    cudaError_t e = cudaMallocAsync(&p, bytes, dev->stream);
    if (e == cudaErrorMemoryAllocation) return no_memory(dev, bytes, err);
    STI_CUDA(e, "allocating memory");
    e = cudaMemsetAsync(p, 0, bytes, dev->stream);
    if (e != cudaSuccess) {
        (void)cudaFreeAsync(p, dev->stream);
        return sti_cuda_check(e, "clearing memory", err);
    }
    *out = (sti_block){.p = p, .bytes = bytes};
    dev->used += counted(bytes);
    return STILL_OK;
}

void sti_cuda_mem_free(sti_dev *dev, sti_block *b)
{
    if (b->p) {
        (void)cudaFreeAsync(b->p, dev->stream);
        dev->used -= counted(b->bytes);
    }
    *b = (sti_block){0};
}

/* What the pool has and nobody uses is free too. */
size_t sti_cuda_mem_left(const sti_dev *dev)
{
    cudaMemPool_t pool;
    uint64_t has = 0, used = 0;
    size_t left = 0, all = 0;
    (void)cudaMemGetInfo(&left, &all);
    if (cudaDeviceGetDefaultMemPool(&pool, dev->ordinal) == cudaSuccess) {
        (void)cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &has);
        (void)cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used);
    }
    left += (size_t)(has > used ? has - used : 0);
    return dev->limit && dev->limit - dev->used < left ? dev->limit - dev->used : left;
}

bool sti_cuda_on_device(const void *p)
{
    struct cudaPointerAttributes a;
    return cudaPointerGetAttributes(&a, p) == cudaSuccess &&
           a.type == cudaMemoryTypeDevice;
}

static still_status mem_move(sti_dev *dev, void *to, const void *from, size_t bytes,
                             still_error *err)
{
    if (bytes == 0) return STILL_OK;
    STI_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, dev->stream),
             "copying memory");
    /* Within the device the stream keeps the order; the program has to wait. */
    if (sti_cuda_on_device(to) && sti_cuda_on_device(from)) return STILL_OK;
    STI_CUDA(cudaStreamSynchronize(dev->stream), "waiting for a copy");
    return STILL_OK;
}

static still_status mem_clear(sti_dev *dev, void *p, size_t bytes, still_error *err)
{
    if (bytes > 0)
        STI_CUDA(cudaMemsetAsync(p, 0, bytes, dev->stream), "clearing memory");
    return STILL_OK;
}

static size_t mem_peak(sti_dev *dev, bool restart)
{
    cudaMemPool_t pool;
    uint64_t high = 0, now = 0, zero = 0;
    if (cudaDeviceGetDefaultMemPool(&pool, dev->ordinal) != cudaSuccess) return 0;
    if (restart) {
        sti_cuda_mem_free(dev, &dev->scratch);
        sti_cuda_graphs_forget(dev); /* they have its address */
        (void)cudaStreamSynchronize(dev->stream);
        (void)cudaMemPoolTrimTo(pool, 0);
        (void)cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &zero);
    }
    (void)cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &high);
    (void)cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &now);
    return (size_t)(high > now ? high : now);
}

/* Beside the old scratch, or, where memory is short, in its place; after failure it is
 * as large as before, if that can be had. What is queued uses the old one first. */
static still_status grow_scratch(sti_dev *dev, size_t bytes, still_error *err)
{
    const size_t before = dev->scratch.bytes;
    sti_block grown;
    still_status st = sti_cuda_mem_new(dev, bytes, &grown, err);
    sti_cuda_graphs_forget(dev); /* they have the old address */
    if (st == STILL_OK || before > 0) sti_cuda_mem_free(dev, &dev->scratch);
    if (st == STILL_E_MEMORY && before > 0) {
        still_error unused;
        st = sti_cuda_mem_new(dev, bytes, &grown, err);
        if (st != STILL_OK) (void)sti_cuda_mem_new(dev, before, &grown, &unused);
    }
    dev->scratch = grown;
    return st;
}

still_status sti_cuda_scratch(sti_dev *dev, size_t bytes, void **out, still_error *err)
{
    if (bytes > dev->scratch.bytes) {
        if (sti_cuda_capturing(dev))
            return sti_fail(err, STILL_E_MEMORY,
                            "cuda: a captured pass needs more scratch (%zu bytes) "
                            "than the one before it",
                            bytes);
        STI_TRY(grow_scratch(dev, bytes, err));
    }
    *out = dev->scratch.p;
    return STILL_OK;
}

/* ---- Device -------------------------------------------------------------- */

static void dev_free(sti_dev *dev)
{
    if (!dev) return;
    if (dev->stream || dev->callers) (void)cudaStreamSynchronize(dev->stream);
#if STI_HAVE_NCCL
    sti_cuda_ranks_leave(dev);
#endif
    sti_cublaslt_free(dev);
    sti_cuda_bf16_free(dev);
    sti_cuda_graphs_free(dev);
    sti_cuda_mem_free(dev, &dev->scratch);
    sti_cuda_mem_free(dev, &dev->lt_workspace);
    if (dev->lt) (void)cublasLtDestroy(dev->lt);
    if (dev->stream && !dev->callers) {
        (void)cudaStreamSynchronize(dev->stream);
        (void)cudaStreamDestroy(dev->stream);
    }
    free(dev);
}

/* Freed memory stays with the pool, so that what is freed and taken again costs
 * nothing; but no more of it than the device may take. */
static still_status keep_memory(const sti_dev *dev, still_error *err)
{
    cudaMemPool_t pool;
    uint64_t all = dev->limit ? dev->limit : UINT64_MAX;
    STI_CUDA(cudaDeviceGetDefaultMemPool(&pool, dev->ordinal),
             "finding its memory pool");
    STI_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all),
             "setting up its memory pool");
    return STILL_OK;
}

/* Processes that a launcher started on one machine share its GPUs round robin. */
static int gpu_of_rank(int n)
{
    static const char *const name[] = {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                                       "MV2_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK",
                                       "SLURM_LOCALID"};
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        const char *text = getenv(name[i]);
        const long rank = text ? strtol(text, NULL, 10) : -1;
        if (rank >= 0) return (int)(rank % n);
    }
    return 0;
}

static still_status find_gpu(sti_dev *dev, still_error *err)
{
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0) {
        (void)cudaGetLastError();
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "no GPU can be used (%s): use --backend cpu",
                        e != cudaSuccess ? cudaGetErrorString(e) : "none is there");
    }
    struct cudaDeviceProp p;
    if (dev->callers) {
        STI_CUDA(cudaGetDevice(&dev->ordinal), "asking for the current GPU");
    } else {
        dev->ordinal = gpu_of_rank(n);
        STI_CUDA(cudaSetDevice(dev->ordinal), "taking the GPU");
    }
    STI_CUDA(cudaGetDeviceProperties(&p, dev->ordinal), "asking what the GPU is");
    dev->sms = p.multiProcessorCount;
    dev->major = p.major;
    dev->minor = p.minor;
    snprintf(dev->name, sizeof dev->name, "%.64s (sm_%d%d)", p.name, p.major, p.minor);
    if (p.major < OLDEST_MAJOR)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s is too old: sm_%d0 or later is needed; use --backend cpu",
                        dev->name, OLDEST_MAJOR);
    return STILL_OK;
}

static still_status set_up(sti_dev *dev, still_error *err)
{
    STI_TRY(find_gpu(dev, err));
    if (!dev->callers)
        STI_CUDA(cudaStreamCreateWithFlags(&dev->stream, cudaStreamNonBlocking),
                 "making a stream");
    STI_TRY(keep_memory(dev, err));
    STI_TRY(sti_cuda_has_pdl(&dev->pdl, err));
    STI_TRY(sti_cublas_check(cublasLtCreate(&dev->lt), "starting cuBLASLt", err));
    STI_TRY(sti_cuda_mem_new(dev, LT_WORKSPACE, &dev->lt_workspace, err));
    return sti_cuda_graphs_new(dev, err);
}

static still_status dev_new(const sti_dev_params *p, sti_dev **out, still_error *err)
{
    *out = NULL;
    if (p->isa)
        return sti_fail(err, STILL_E_ARG, "backend cuda has no instruction set '%s'",
                        p->isa);
    sti_dev *dev = sti_alloc(1, sizeof *dev);
    if (!dev) return sti_fail_memory(err, "cuda device", sizeof *dev);
    dev->max_k = p->max_k;
    dev->heads = p->heads;
    dev->kv_heads = p->kv_heads;
    dev->head_dim = p->head_dim;
    dev->limit = p->memory;
    dev->callers = p->callers_gpu;
    dev->stream = p->callers_gpu ? p->stream : NULL;
    still_status st = set_up(dev, err);
    if (st != STILL_OK) {
        dev_free(dev);
        return st;
    }
    *out = dev;
    return STILL_OK;
}

static const char *dev_isa(const sti_dev *dev)
{
    return dev->name;
}

static int dev_threads(const sti_dev *dev)
{
    return dev->sms;
}

/* Scratch of products and softmax attention, for so many rows. */
static size_t scratch_of(const sti_dev *dev, int rows)
{
    const size_t M = (size_t)rows, K = sti_cuda_round_up((size_t)dev->max_k, 8);
    const size_t products =
        sti_cuda_round_up(M * K * sizeof(sti_half), 256) + dev->half_scratch;
    const size_t sessions = M < STI_CUDA_ATTN_SEGS ? M : STI_CUDA_ATTN_SEGS;
    const size_t pieces = sessions * (size_t)dev->heads * STI_CUDA_ATTN_SPLITS;
    const size_t attention = pieces * ((size_t)dev->head_dim + 2) * sizeof(float);
    return products > attention ? products : attention;
}

/* Before the first pass, so that none can fail for want of it when it has changed the
 * states of some layers; hybrid_reserve does the same for the hybrid operator. */
static still_status dev_reserve(sti_dev *dev, int rows, still_error *err)
{
    void *scratch;
    return rows > 0 ? sti_cuda_scratch(dev, scratch_of(dev, rows), &scratch, err)
                    : STILL_OK;
}

size_t sti_cuda_bytes_with(const sti_dev *dev, size_t scratch)
{
    const size_t is = dev->scratch.bytes;
    return (scratch > is ? scratch : is) + dev->lt_workspace.bytes;
}

static size_t dev_bytes(const sti_dev *dev, int rows)
{
    return sti_cuda_bytes_with(dev, rows > 0 ? scratch_of(dev, rows) : 0);
}

const sti_backend sti_backend_cuda = {
    .name = "cuda",
    .cache = STI_F16,
    .head_rows = HEAD_ROWS,
    .batch = 4096,
    .host_memory = false,
    .mem_new = sti_cuda_mem_new,
    .mem_free = sti_cuda_mem_free,
    .mem_move = mem_move,
    .mem_clear = mem_clear,
    .mem_peak = mem_peak,
    .mem_left = sti_cuda_mem_left,
    .pass_begin = sti_cuda_pass_begin,
    .pass_end = sti_cuda_pass_end,
    .dev_new = dev_new,
    .dev_free = dev_free,
    .dev_isa = dev_isa,
    .dev_threads = dev_threads,
    .dev_reserve = dev_reserve,
    .dev_bytes = dev_bytes,
    .weight_new = sti_cuda_weight_new,
    .weight_free = sti_cuda_weight_free,
    .weight_bytes = sti_cuda_weight_bytes,
    .matmul = sti_cuda_matmul,
    .embed = sti_cuda_embed,
    .rmsnorm = sti_cuda_rmsnorm,
    .rope = sti_cuda_rope,
    .swiglu = sti_cuda_swiglu,
    .scale_columns = sti_cuda_scale_columns,
    .ffn_forward = sti_cuda_ffn,
    .softmax_attn = sti_cuda_softmax_attn,
    .logprob = sti_cuda_logprob,
    .matmul_lora = sti_cuda_matmul_lora,
    .matmul_back = sti_cuda_matmul_back,
    .matmul_grad = sti_cuda_matmul_grad,
    .rmsnorm_back = sti_cuda_norm_back,
    .swiglu_back = sti_cuda_gated_back,
    .ffn_train = sti_cuda_ffn_train,
    .ffn_back = sti_cuda_ffn_back,
    .loss = sti_cuda_loss,
    .adam = sti_cuda_adam,
    .sum_squares = sti_cuda_sum_squares,
    .compare = sti_cuda_compare,
    .dropout = sti_cuda_dropout,
    .scale = sti_cuda_scale,
#if STI_HAVE_NCCL
    .ranks_name = sti_cuda_ranks_name,
    .ranks_new_id = sti_cuda_ranks_new_id,
    .ranks_join = sti_cuda_ranks_join,
    .ranks_sum = sti_cuda_ranks_sum,
#endif
    .state_kv = 0, /* as the session's cache */
    .state_real = sizeof(float),
    .hybrid_reserve = sti_cuda_hybrid_reserve,
    .hybrid_bytes = sti_cuda_hybrid_bytes,
    .hybrid_applies_rope = sti_cuda_hybrid_ropes,
    .hybrid = sti_cuda_hybrid,
    .hybrid_route = sti_cuda_hybrid_route,
    .hybrid_parallel = sti_cuda_hybrid_parallel,
    .hybrid_backward = sti_cuda_hybrid_backward,
    .linear_reserve = sti_cuda_linear_reserve,
    .linear_bytes = sti_cuda_linear_bytes,
    .linear = sti_cuda_linear_forward,
    .linear_backward = sti_cuda_linear_backward,
};
