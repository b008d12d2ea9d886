/* still.h - the public interface of libstill, and its manual.
 *
 * still loads pretrained language models (GGUF files, Hugging Face folders), runs them,
 * and linearizes them: attention is replaced by a method whose memory is constant and
 * whose time is linear in the length of the text (docs/methods.md). It works on a CPU or
 * on an NVIDIA GPU: see still_model_params.backend.
 *
 * Sections, and the commands that are built on them:
 *
 *     tokenizers, chat templates    tokenize, chat
 *     models, attention methods     inspect
 *     attention and adapters for programs with models of their own
 *     constrained output            generate, chat, serve
 *     sessions, sampling, guessing  generate, chat, serve, logprobs
 *     perplexity                    perplexity
 *     linearizing, allocating       linearize, allocate
 *     exporting                     export
 *     evaluation                    eval
 *     measuring                     bench
 *     saliency                      saliency
 *     self-tests                    selftest
 *     reading text                  perplexity, saliency
 *
 * (pull and pull-data download files; that is the command's own work.)
 *
 * Life of a program:
 *
 *     still_model   *m;  still_session *s;  still_error e;
 *     if (still_model_open("model.gguf", NULL, &m, &e)) fail(e.text);
 *     if (still_session_new(m, NULL, &s, &e)) fail(e.text);
 *     still_session_feed(s, prompt, n, &e);
 *     const float *logits = still_session_logits(s);
 *     still_session_free(s);
 *     still_model_free(m);
 *
 * Rules that hold everywhere:
 *   - A fallible function returns still_status and takes still_error *err last;
 *     err may be NULL. STILL_OK is 0. On failure, outputs are untouched (an
 *     out-pointer is set to NULL) and err->text is one line: where, what was
 *     found, what was expected.
 *   - Whoever creates, frees. still_X_free(NULL) does nothing.
 *   - The library never prints, never exits, keeps no globals. Objects may move
 *     between threads; one object is used by one thread at a time. A model is
 *     read-only after opening, but its sessions share its threads and its memory for
 *     activations: use the sessions of one model from one thread at a time.
 *   - A child of fork() may use and free what it inherits, unless a call was under way or
 *     the backend is cuda; there it computes on one thread.
 *   - A params pointer may be NULL: all defaults. In a params struct zero is the default,
 *     so set its size and what you mean; STILL_PARAMS does it. A params struct and what it
 *     points to is read, not kept.
 *   - Strings are UTF-8; token ids are int32_t; sizes in bytes are size_t.
 *
 * Structs grow, and programs that were built before go on working with a later library of
 * the same soname:
 *   - What you fill in and pass begins with its size. Members that a shorter, earlier struct
 *     does not have are zero, the default. A longer, later one is taken as long as all that
 *     this library does not know is zero, and refused if not. A size that no version has,
 *     such as a forgotten 0, is refused.
 *   - What the library makes and you read through a pointer (still_model_info, still_saliency,
 *     what callbacks get) only ever gains members at its end.
 *   - What the library writes into your memory (still_bill, still_eval_result) is filled
 *     whole, whatever was in it, and so has no size that you could forget to set. When one
 *     grows, its function gets a new symbol version (cmake/libstill.map.in), and programs
 *     built before go on calling the one that writes the shorter struct.
 *   - What lies in arrays or is passed by value (still_message, still_logit_bias,
 *     still_train_data, still_agreement, still_error, still_method) has one size for good:
 *     additions go beside the array. still_method has room in reserve.
 */
#ifndef STILL_H
#define STILL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STILL_API __attribute__((visibility("default")))

#define STILL_VERSION_MAJOR 0
#define STILL_VERSION_MINOR 1
#define STILL_VERSION_PATCH 0
STILL_API const char *still_version(void); /* "0.1.0" */

/* ---- Errors -------------------------------------------------------------- */

typedef enum still_status {
    STILL_OK = 0,
    STILL_E_ARG,         /* an argument is invalid */
    STILL_E_IO,          /* the operating system reported an error */
    STILL_E_FORMAT,      /* a file is damaged, or not of the expected format */
    STILL_E_UNSUPPORTED, /* well-formed, but not something still can run */
    STILL_E_MEMORY,      /* out of memory */
    STILL_E_LIMIT,       /* longer than the context, larger than a cap */
    STILL_E_NUMERIC,     /* NaN or infinity where a number must be */
    STILL_E_CANCELLED    /* a progress callback asked to stop */
} still_status;

typedef struct still_error {
    still_status code;
    char text[1024];
} still_error;

/* A params struct with its size and what you set in it:
 *     still_session_new(m, &STILL_PARAMS(still_session_params, .ctx = 4096), &s, &e);
 * The same without the macro:
 *     still_session_params p = {.size = sizeof p, .ctx = 4096}; */
#define STILL_PARAMS(type, ...) ((type){.size = sizeof(type), __VA_ARGS__})

/* "format error" and the like: a word or two for a status. */
STILL_API const char *still_status_name(still_status s);

/* Called from time to time during long work. done and total count the unit the
 * function documents (total 0: unknown). Return false to cancel. */
typedef bool (*still_progress_fn)(void *user, uint64_t done, uint64_t total);

/* ---- Tokenizers ---------------------------------------------------------- */

typedef struct still_tokenizer still_tokenizer;

/* Opens a tokenizer: a GGUF file (its metadata), a Hugging Face folder or
 * tokenizer.json, Mistral's tekken.json, a SentencePiece .model, or a tiktoken rank file
 * (Llama 3's). */
STILL_API still_status still_tokenizer_open(const char *path, still_tokenizer **out,
                                            still_error *err);
/* The same for any tiktoken rank file, which does not say how text is split before it is
 * merged: split names the rule as GGUF files do ("qwen2", "llama-bpe" ...). */
STILL_API still_status still_tokenizer_open_split(const char *path, const char *split,
                                                  still_tokenizer **out,
                                                  still_error *err);
STILL_API void still_tokenizer_free(still_tokenizer *tk);

typedef enum still_encode_flags {
    STILL_ENCODE_BOS = 1,     /* put BOS in front if the tokenizer is set to add it */
    STILL_ENCODE_SPECIAL = 2, /* text of special tokens becomes those tokens */
} still_encode_flags;

/* Encodes n bytes of text. Writes at most cap ids and always sets *n_ids to the
 * full count, so a first call with cap 0 sizes the buffer. Invalid UTF-8 is
 * encoded as its bytes (byte-level BPE) or as U+FFFD (SentencePiece). */
STILL_API still_status still_tokenizer_encode(const still_tokenizer *tk,
                                              const char *text, size_t n,
                                              unsigned flags, int32_t *ids, size_t cap,
                                              size_t *n_ids, still_error *err);

/* The bytes of one token as decoding emits them ("" for special tokens unless
 * with_special); *n gets the length. Borrowed; valid as long as tk. NULL for an id
 * outside the vocabulary. */
STILL_API const char *still_tokenizer_piece(const still_tokenizer *tk, int32_t id,
                                            bool with_special, size_t *n);
STILL_API int still_tokenizer_vocab_size(const still_tokenizer *tk);
STILL_API int32_t still_tokenizer_bos(const still_tokenizer *tk); /* -1: none */
STILL_API int32_t still_tokenizer_eos(const still_tokenizer *tk); /* -1: none */
STILL_API bool still_tokenizer_adds_bos(const still_tokenizer *tk);
/* Whether id ends a generation: EOS, end of turn, end of text. */
STILL_API bool still_tokenizer_is_end(const still_tokenizer *tk, int32_t id);

/* Streaming decode: push ids, take bytes. Never hands out part of a UTF-8 character:
 * incomplete bytes are held until the next push, and flush turns what is left into
 * U+FFFD. The space that SentencePiece puts before a text is dropped. tk must outlive
 * d. */
typedef struct still_decoder still_decoder;
STILL_API still_status still_decoder_new(const still_tokenizer *tk, bool with_special,
                                         still_decoder **out, still_error *err);
STILL_API void still_decoder_free(still_decoder *d);
/* *text is valid until the next call on d; it is NUL-terminated and *n long. */
STILL_API still_status still_decoder_push(still_decoder *d, int32_t id,
                                          const char **text, size_t *n,
                                          still_error *err);
STILL_API void still_decoder_flush(still_decoder *d, const char **text, size_t *n);

/* ---- Chat templates ------------------------------------------------------ */

typedef struct still_message {
    const char *role; /* "system", "user", "assistant" */
    const char *content;
} still_message;

/* A conversation for a template. */
typedef struct still_conversation {
    size_t size; /* sizeof(still_conversation) */
    const still_message *message;
    size_t n_messages;
    bool add_generation_prompt; /* ends where the assistant's reply begins */
    /* Further variables of the template, a JSON object: {"tools": [...],
     * "enable_thinking": false}; NULL: none. If `message` is NULL, it must have
     * "messages", a list of objects with role, content and whatever else the template
     * reads (tool_calls, ...), as in OpenAI's API. */
    const char *variables;
    size_t n_variables; /* bytes; 0: up to its NUL */
} still_conversation;

/* A conversation as text; each byte is marked as content (it came with the
 * conversation) or as the template's own. */
typedef struct still_rendering {
    char *text;             /* n bytes and a NUL */
    unsigned char *content; /* [n] 1: content, 0: the template's */
    size_t n;
} still_rendering;
STILL_API void
still_rendering_free(still_rendering *r); /* what it holds; r is zeroed */

/* The model's own chat template (Jinja text), borrowed; NULL if it has none. */
STILL_API const char *still_tokenizer_chat_template(const still_tokenizer *tk);
/* Templates that come with still: the i-th name ("chatml"), NULL past the last; and the
 * Jinja text of a name. Both static. */
STILL_API const char *still_chat_template_at(int i);
STILL_API const char *still_chat_template_named(const char *name); /* NULL: unknown */

/* Renders a conversation with a chat template, written in the part of Jinja that models
 * use. The template's text is untrusted: its run is bounded in time and memory. tk
 * gives bos_token and eos_token. chat_template NULL: the tokenizer's own,
 * STILL_E_UNSUPPORTED if it has none. STILL_E_ARG: the template refuses the
 * conversation (raise_exception). *out must be zeroed, or have been freed; it is empty
 * after failure. Free it with still_rendering_free. */
STILL_API still_status still_chat_render(const still_tokenizer *tk,
                                         const char *chat_template,
                                         const still_conversation *c,
                                         still_rendering *out, still_error *err);
/* Encodes a rendering from byte `from` on. Only the template's own text becomes special
 * tokens: an <|im_end|> that a user typed stays text. No BOS is added; templates write
 * it. ids, cap and n_ids as in still_tokenizer_encode. */
STILL_API still_status still_chat_encode(const still_tokenizer *tk,
                                         const still_rendering *r, size_t from,
                                         int32_t *ids, size_t cap, size_t *n_ids,
                                         still_error *err);

/* ---- Constrained output -------------------------------------------------- */

/* What a text must look like, compiled for a tokenizer: a grammar (GBNF), a JSON schema,
 * or any JSON object. docs/grammar.md has both languages. The text is not trusted: size,
 * depth and time are bounded, and what is not supported is refused by name, never
 * ignored. A grammar keeps masks that its matchers found: use the matchers of one grammar
 * from one thread at a time. tk must outlive it. */
typedef struct still_grammar still_grammar;

/* Rules as llama.cpp writes them; generation starts at the rule named root. Errors name
 * line and column. n: bytes of text. */
STILL_API still_status still_grammar_open_gbnf(const still_tokenizer *tk,
                                               const char *text, size_t n,
                                               still_grammar **out, still_error *err);
/* A JSON schema. Errors name the place as a JSON pointer. */
STILL_API still_status still_grammar_open_schema(const still_tokenizer *tk,
                                                 const char *schema, size_t n,
                                                 still_grammar **out, still_error *err);
/* Any JSON object. */
STILL_API still_status still_grammar_open_json(const still_tokenizer *tk,
                                               still_grammar **out, still_error *err);
STILL_API void still_grammar_free(still_grammar *g);

/* A position in a grammar: what has been generated so far. All its memory is allocated
 * here. vocab: the number of logits, which may exceed the tokenizer's tokens (the rest
 * are never allowed). g must outlive it. */
typedef struct still_matcher still_matcher;
STILL_API still_status still_matcher_new(still_grammar *g, int vocab,
                                         still_matcher **out, still_error *err);
STILL_API void still_matcher_free(still_matcher *m);
STILL_API void still_matcher_reset(still_matcher *m); /* back to the start */
STILL_API still_status still_matcher_fork(const still_matcher *m, still_matcher **out,
                                          still_error *err);
/* The tokens that may come next: bit id % 64 of bits[id / 64], [(vocab + 63) / 64]. A
 * token is allowed if some text of the grammar continues with its bytes; end tokens are
 * allowed where the text may end, other special tokens never. STILL_E_LIMIT: the
 * grammar is so ambiguous, or the text nested so deep, that finding out takes too much
 * time or memory; STILL_E_UNSUPPORTED: no token fits. */
STILL_API still_status still_matcher_mask(still_matcher *m, uint64_t *bits,
                                          still_error *err);
/* Advances m by a token. STILL_E_ARG: it is not allowed here, and m is as it was. */
STILL_API still_status still_matcher_accept(still_matcher *m, int32_t id,
                                            still_error *err);
/* Whether the text may end here; done: it must, nothing else may follow. */
STILL_API bool still_matcher_can_end(const still_matcher *m);
STILL_API bool still_matcher_done(const still_matcher *m);

/* ---- Models -------------------------------------------------------------- */

typedef struct still_model still_model;
typedef struct still_method still_method;

typedef struct still_model_params {
    size_t size; /* sizeof(still_model_params) */
    /* "cpu" (NULL: this one). "ref": the specification, in double, slow. "bf16": the
     * cpu's softmax attention rounded to bfloat16 where frameworks round, to compare
     * with published scores. "cuda": one NVIDIA GPU, in builds that have it. */
    const char *backend;
    int threads;         /* 0: one per core; fewer work while cores are lost */
    const char *isa;     /* cpu: "amx", "avx512", "avx2", "portable"; NULL: best */
    const char *adapter; /* what still_linearize wrote: a folder, or a file
                            NAME.still.gguf; NULL: the plain model */
    bool no_merge;     /* low-rank additions of the adapter stay apart: exact, slower */
    size_t gpu_memory; /* cuda: most bytes of the GPU's memory that weights, sessions
                          and scratch take together; 0: all there are. The driver's own,
                          about half a gigabyte, comes on top */
    bool rope_bf16;    /* round the RoPE frequencies to bf16, as code does that casts a
                       whole model with its tables; only to compare with such code */
    double attn_scale; /* of q . k, where the file cannot say it: GGUF has no key for
                          Gemma's; 0: as the file says */
} still_model_params;

/* Opens a GGUF file or a Hugging Face folder. Weights are mapped, not read, except
 * those the backend stores in a layout of its own. */
STILL_API still_status still_model_open(const char *path, const still_model_params *p,
                                        still_model **out, still_error *err);
STILL_API void still_model_free(still_model *m);

/* A model of a published shape ("llama3.1-8b") with random weights in f16, always the
 * same ones, and without a tokenizer: for measuring, as speed and memory are those of
 * the real model. On the cpu its weights lie in memory (STILL_E_MEMORY if there is not
 * enough). */
STILL_API still_status still_model_open_shape(const char *shape,
                                              const still_model_params *p,
                                              still_model **out, still_error *err);
STILL_API const char *still_shape_at(int i); /* name of the i-th; NULL past the last */

/* The base model of an adapter, as it was named in training (a path, or a name that the
 * program resolved), into name. STILL_E_LIMIT: capacity is too small. */
STILL_API still_status still_adapter_base(const char *adapter, char *name,
                                          size_t capacity, still_error *err);

/* Added to the logit of a token; -INFINITY: it is never chosen. */
typedef struct still_logit_bias {
    int32_t id;
    float bias;
} still_logit_bias;

/* How tokens are chosen; see Sampling. */
typedef struct still_sampler_params {
    size_t size;          /* sizeof(still_sampler_params) */
    float temperature;    /* 0: greedy */
    int top_k;            /* 0: off */
    float top_p;          /* 0 or 1: off */
    float min_p;          /* 0: off; keeps p >= min_p * p_max */
    float repeat_penalty; /* 0 or 1: off */
    int repeat_last;      /* tokens looked back at for the penalty; 0: 64 */
    uint64_t seed;
    /* Taken off the logit of a token that was generated before: once, and once for each
     * time. Negative ones make it more likely. */
    float presence_penalty, frequency_penalty;
    const still_logit_bias *bias; /* [n_bias], copied */
    int n_bias;
} still_sampler_params;

typedef struct still_model_info {
    const char *path, *name, *arch, *backend, *isa;
    int threads;
    int layers, hidden, ffn, heads, kv_heads, head_dim, vocab;
    int ctx_train;      /* trained context length */
    int sliding_window; /* 0: none */
    double rope_theta;
    bool tied;                  /* the embedding is also the output matrix */
    uint64_t params;            /* number of weights */
    const still_method *method; /* that its adapter was trained for; NULL: none */
    size_t file_bytes;          /* bytes of all weight files */
    const char
        *merged; /* type of the matrices that the adapter's low-rank additions were
                           merged into: "q5_1"; NULL: none were */
    const char *adapter; /* its folder or file; NULL: none */
    /* How its authors sample: "sampling" of an adapter's still.json, else a folder's
     * generation_config.json or a GGUF file's general.sampling.*. Numbers that they
     * leave out are negative. */
    const still_sampler_params *sampling;
} still_model_info;
/* Borrowed; valid as long as m. */
STILL_API const still_model_info *still_model_get_info(const still_model *m);

typedef struct still_tensor_info {
    const char *name, *dtype;
    int n_dims;
    int64_t dim[4]; /* outermost first: [out, in] for a matrix */
    size_t bytes;
} still_tensor_info;
STILL_API size_t still_model_tensor_count(const still_model *m);
/* The i-th tensor, its strings borrowed from m; false: there is none. */
STILL_API bool still_model_tensor(const still_model *m, size_t i,
                                  still_tensor_info *out);

/* The model's tokenizer, borrowed; NULL if its files bring none. */
STILL_API const still_tokenizer *still_model_tokenizer(const still_model *m);

/* ---- Attention methods --------------------------------------------------- */

typedef enum still_positions {
    STILL_POSITIONS_AUTO = 0, /* absolute up to the trained length, capped beyond */
    STILL_POSITIONS_ABSOLUTE, /* distances are what they are */
    STILL_POSITIONS_CAPPED    /* no key is seen farther away than the trained length */
} still_positions;

/* How layers remember the past. Start from still_method_init and change what you mean;
 * docs/methods.md has the equations. A method ignores the fields it has no use for. */
struct still_method {
    char name[16]; /* see still_method_at: "softmax", "still", "lolcats", ... */
    int chunk;     /* C: the window is 1 to 2 chunks */
    int select;    /* lambda: tokens of a chunk that stay exact when it leaves */
    int cap;       /* most salient tokens, those that stay exact; -1: no cap. The budget
                      of exact tokens is 2 chunk + cap */
    /* Uneven caps: layers, or heads of a layer, with another cap, "17-18:768,23/0:512";
     * "": none. A head is one that chooses for itself: a kv head, or, per_head, a query
     * head. still_allocate finds good ones. */
    char caps[4096];
    /* Bits of a salient token's keys (8 or 5) and values (4 or 3); 0: they are stored as
     * in the window. */
    int key_bits, value_bits;
    char score[16]; /* what chooses them: "s3" (STILL eq. 5), "distinct" (KeyDiff's
                       formula), "received", "keynorm" or "random" */
    bool per_head;  /* choose and fold per query head instead of per kv head */
    /* LoLCATs' scaling of the linear term instead of the exact one. */
    bool window_scale;
    bool norm_preserved; /* the feature map keeps the norm of its input (STILL eq. 6) */
    bool gate;           /* gate on the linear term (STILL eq. 7) */
    bool forget;         /* no linear state: what is not kept exact is gone */
    int first_layer, last_layer; /* layers it replaces, others stay softmax; -1: last */
    still_positions positions;
    uint64_t seed;        /* of the random score */
    uint64_t reserved[8]; /* zero; for what later versions know */
};

/* The defaults of a method; chunk 0: its usual size. */
STILL_API still_status still_method_init(still_method *out, const char *name, int chunk,
                                         still_error *err);
/* The settings of "still" that remember most in the same bytes once a model is trained
 * for them: every token may stay exact, chosen by the score that keeps facts whole,
 * with 5 bits a key element and 3 a value element, and the linear term has no gate.
 * still_allocate then chooses caps for a model. */
STILL_API still_status still_method_compact(still_method *out, int chunk,
                                            still_error *err);
/* The same for a model without an adapter: 8 and 4 bits, and no linear state, which
 * only a trained model can use; its bytes are better spent on salient tokens. */
STILL_API still_status still_method_untrained(still_method *out, int chunk,
                                              still_error *err);
/* Name and one-line summary of the i-th method; NULL past the last. */
STILL_API const char *still_method_at(int i, const char **summary);

/* ---- Attention and adapters for other programs --------------------------- */

/* The attention of a method alone, over whole sequences and with its gradient, for
 * programs that have layers of their own (still.torch is one). The methods are those of
 * the hybrid operator: still, lolcats, hedgehog, t2r, swa, softmax.
 *
 * The object holds the threads and the scratch memory, which grows to what the largest
 * call needs; any number of layers can share it. */
typedef struct still_attention still_attention;

typedef struct still_attention_params {
    size_t size;         /* sizeof(still_attention_params) */
    const char *backend; /* these three as in still_model_params */
    int threads;
    const char *isa;
    /* cuda: the cudaStream_t that calls are queued on, of the GPU that is current in the
     * calling thread; it has to be in every call. NULL: the default stream. Calls return
     * before the GPU is done. */
    void *stream;
} still_attention_params;
STILL_API still_status still_attention_new(const still_attention_params *p,
                                           still_attention **out, still_error *err);
STILL_API void still_attention_free(still_attention *a);

/* One layer's attention over B sequences of T tokens, each from its beginning.
 *
 * Arrays are dense, the last index runs fastest, and they lie where the backend
 * computes (cuda: in the GPU's memory). S is H if the method is per_head, else G. An
 * input that is NULL has its value at the start of training; one that the method has no
 * use for is not read. */
typedef struct still_attention_args {
    size_t size;                /* sizeof(still_attention_args) */
    const still_method *method; /* NULL: "still". Positions cannot be capped */
    int layer, layers;          /* which it is of how many, from 0 on, for a method that
                                   says something of layers; layers 0: it is alone */
    int batch, tokens;          /* B, T */
    int heads, kv_heads, head_dim; /* H, G, D; H is a multiple of G */
    const float *q;               /* [B,T,H,D] after RoPE; logits are q . k / sqrt(D) */
    const float *k, *v;           /* [B,T,G,D], k after RoPE */
    const float *gate_logit;      /* [B,T,H,D], gate = 2 sigmoid(it); NULL: gate 1 */
    const float *alpha;           /* [H], the linear term weighs exp(alpha); NULL: 0 */
    const float *window_logit;    /* [H], of lolcats' window factor; NULL: factor 0.1 */
    const float *map_q, *map_k;   /* [H,D,D], [S,D,D], u = x map; NULL: identity */
    const float *bias_q, *bias_k; /* [H], [S], of t2r's map; NULL: 0 */
    /* [B,T,S]: the chunk at whose first token a token is folded into the linear state,
     * -1: never. forward chooses and writes it, backward reads it. */
    int32_t *route;
    float *y; /* [B,T,H,D]: forward writes it */
    /* Backward: the gradient of y, and those of the inputs, of their shapes; NULL: not
     * wanted. Those of q, k, v and gate_logit are written, the others are added to. */
    const float *dy;
    float *dq, *dk, *dv, *dgate_logit;
    float *dalpha, *dwindow_logit, *dmap_q, *dmap_k, *dbias_q, *dbias_k;
} still_attention_args;

/* Chooses route, computes y. */
STILL_API still_status still_attention_forward(still_attention *a,
                                               const still_attention_args *x,
                                               still_error *err);
/* Gradients, route held fixed. Inputs are those of forward; y is not read. */
STILL_API still_status still_attention_backward(still_attention *a,
                                                const still_attention_args *x,
                                                still_error *err);

/* The numbers of an adapter (a folder, or a file NAME.still.gguf). Its checksum is
 * verified; whether its shapes fit a model is for the caller to check. Tensors are
 * called
 *     layers.N.map_q, .map_k, .bias_q, .bias_k, .alpha, .window, as in
 *     still_attention_args; layers.N.gate [H D, hidden], whose product with the layer's
 *     normed input is gate_logit; layers.N.lora.X.a [rank, in], .b [out, rank] with X one
 *     of q, k, v, o, gate: W + lora_alpha / lora_rank b a.
 * Of q and k, elements of a head are in the order of the base's file: GGUF files of llama
 * have the two of a RoPE pair side by side, Hugging Face folders half a head apart. */
typedef struct still_adapter still_adapter;

typedef struct still_adapter_info {
    const still_method *method;
    const char *base; /* its model, as still_adapter_base has it */
    int lora_rank;    /* 0: there are no low-rank additions */
    double lora_alpha;
} still_adapter_info;
STILL_API still_status still_adapter_open(const char *path, still_adapter **out,
                                          still_error *err);
STILL_API void still_adapter_free(still_adapter *a);
/* This and the tensors' strings are borrowed from a. */
STILL_API const still_adapter_info *still_adapter_get_info(const still_adapter *a);
STILL_API size_t still_adapter_tensor_count(const still_adapter *a);
/* The i-th tensor; false: there is none. */
STILL_API bool still_adapter_tensor(const still_adapter *a, size_t i,
                                    still_tensor_info *out);
/* The numbers of the i-th tensor as floats; out has room for n, which is their count. */
STILL_API still_status still_adapter_values(const still_adapter *a, size_t i,
                                            float *out, size_t n, still_error *err);

/* ---- Sessions ------------------------------------------------------------ */

typedef struct still_session still_session;

typedef struct still_session_params {
    size_t size;       /* sizeof(still_session_params) */
    int ctx;           /* most tokens it can hold; 0: the trained length */
    int batch;         /* most tokens computed at once in prefill; 0: 512, cuda 4096.
                          Fewer where the GPU's memory does not hold that many */
    const char *cache; /* keys and values: "f16" or "f32"; NULL: f16 on cpu and cuda,
                          but f32 on ref and bf16, and for models stored in f32 */
    const still_method *method; /* read, not kept; NULL: what the model's adapter was
                                   trained for, softmax if it has none */
    int rollback; /* chunk boundaries still_session_rollback can return to */
} still_session_params;

/* Where memory goes. Known before the first token. */
typedef struct still_bill {
    size_t weights_mapped;   /* bytes of files the run reads in place */
    size_t weights_resident; /* copies in the backend's own layout */
    size_t cache;            /* per session: key/value cache or state */
    size_t rollback;         /* per session: copies of it that rollback returns to */
    size_t scratch;          /* per session: activations and logits */
    size_t runtime;          /* tokenizer, tables, code: what else the process held when
                                the model was open, and what those grow by in a run */
    size_t total;            /* the peak that the system will show (VmHWM) */
    size_t device; /* of the total, what is in a GPU's memory; its driver's own comes on
                      top */
} still_bill;
/* The bill of a session with these settings, which is not made. */
STILL_API still_status still_model_bill(const still_model *m,
                                        const still_session_params *p, still_bill *out,
                                        still_error *err);

/* An empty session, all its memory allocated. m must outlive it. */
STILL_API still_status still_session_new(still_model *m, const still_session_params *p,
                                         still_session **out, still_error *err);
STILL_API void still_session_free(still_session *s);

/* Append n tokens; the last one's logits are then in still_session_logits().
 * tok is read, not kept. On error the session is as it was before; after STILL_E_NUMERIC,
 * which names the layer whose output is not finite, reset it. */
STILL_API still_status still_session_feed(still_session *s, const int32_t *tok, int n,
                                          still_error *err);

/* Feeds tok, and in the same pass computes the logits after each of n guesses of what
 * follows it, which takes little longer (speculative decoding). The session then holds
 * tok and no guess. Feeding the first guess, by this call or by still_session_feed,
 * takes its logits from that pass at almost no cost, then the second, and so on; a
 * token that was not guessed, or any other use of the model, drops the remaining
 * guesses. Results are those of feeding one by one, bit for bit. Guesses past the end
 * of a chunk could not be dropped and are not computed (softmax has no chunks). None
 * are computed where results depend on the rows of a pass (cuda), where a score sums
 * over queries ("received"), or for methods without a window. guess is read, not kept,
 * 31 at most. *rows (may be NULL): rows of the pass; 0: there was none, as tok had been
 * guessed. */
STILL_API still_status still_session_feed_ahead(still_session *s, int32_t tok,
                                                const int32_t *guess, int n, int *rows,
                                                still_error *err);

/* One token for each of n sessions of one model, computed together; each result is the
 * one still_session_feed would give, bit for bit (on a GPU: but for the last bits). No
 * session may occur twice. On error the sessions are as they were before; after
 * STILL_E_NUMERIC reset them. */
STILL_API still_status still_session_step(still_session **s, const int32_t *tok, int n,
                                          still_error *err);
/* The same, but top [n] gets the most likely id after each and no logits are kept,
 * which on a GPU saves copying them. If the results of some sessions are not finite
 * (STILL_E_NUMERIC), only these fail: their ids are -1, the others are valid, and err
 * is that of the first. Reset them. If the whole step fails, all ids are -1. */
STILL_API still_status still_session_step_top(still_session **s, const int32_t *tok,
                                              int n, int32_t *top, still_error *err);
/* The same, but some sessions keep their logits: session i if keep[i] (keep NULL:
 * none), and those whose most likely id is not in `enough`, bits of ids as in
 * still_sampler_sample_masked (NULL: all ids are). */
STILL_API still_status still_session_step_some(still_session **s, const int32_t *tok,
                                               int n, const bool *keep,
                                               const uint64_t *enough, int32_t *top,
                                               still_error *err);

/* Feeds n tokens and writes logprob[i] = log p(tok[i+1] | everything up to tok[i])
 * for i < n-1; top[i] (may be NULL) is the most likely id at i. */
STILL_API still_status still_session_logprobs(still_session *s, const int32_t *tok,
                                              int n, float *logprob, int32_t *top,
                                              still_error *err);

/* The same with the k most likely ids at each i in top[i*k], most likely first and of
 * equals the lowest id first, and their log-probabilities in top_logprob[i*k]. */
STILL_API still_status still_session_top_logprobs(still_session *s, const int32_t *tok,
                                                  int n, int k, float *logprob,
                                                  int32_t *top, float *top_logprob,
                                                  still_error *err);

/* [vocab] floats after the last token; valid until the next call on s; NULL while
 * the session is empty. */
STILL_API const float *still_session_logits(const still_session *s);
STILL_API int still_session_length(const still_session *s); /* tokens held */
/* The ctx it was made with. */
STILL_API int still_session_limit(const still_session *s);
STILL_API void still_session_reset(still_session *s); /* back to empty */

/* A new session with the same settings, past, logits and boundaries. */
STILL_API still_status still_session_fork(const still_session *s, still_session **out,
                                          still_error *err);

/* A copy of a session's past. Restoring it is exact, bit for bit, and works for any
 * session of the same model with the same method, settings and context; boundaries to
 * roll back to are dropped. Free it with still_snapshot_free. */
typedef struct still_snapshot still_snapshot;
STILL_API still_status still_session_snapshot(const still_session *s,
                                              still_snapshot **out, still_error *err);
STILL_API still_status still_session_restore(still_session *s, const still_snapshot *p,
                                             still_error *err);
/* The same into the snapshot *p, whose memory is reused if the size is the same. After
 * a failure *p is freed and NULL. */
STILL_API still_status still_session_snapshot_again(const still_session *s,
                                                    still_snapshot **p,
                                                    still_error *err);
STILL_API void still_snapshot_free(still_snapshot *p);
/* Bytes of a snapshot, or of one taken now; with methods that keep every key they grow
 * with the length. */
STILL_API size_t still_snapshot_bytes(const still_snapshot *p);
STILL_API size_t still_session_snapshot_bytes(const still_session *s);
STILL_API int still_snapshot_length(const still_snapshot *p); /* tokens */

/* The same in a file, so that a long prompt is computed once. The file is versioned,
 * checksummed and bound to the model and the settings; it is written to a temporary
 * name and renamed. On error the session is as it was before. */
STILL_API still_status still_session_save(const still_session *s, const char *path,
                                          still_error *err);
STILL_API still_status still_session_load(still_session *s, const char *path,
                                          still_error *err);
/* The same for a snapshot, which any thread may save. s: a session it could be restored
 * to. */
STILL_API still_status still_snapshot_save(const still_snapshot *p, const char *path,
                                           still_error *err);
STILL_API still_status still_snapshot_load(const still_session *s, const char *path,
                                           still_snapshot **out, still_error *err);

/* Takes the session back to at most `length` tokens: exactly that many for softmax; for
 * other methods, whose folding cannot be undone, the last kept chunk boundary at or
 * before it (params.rollback says how many are kept). *at is the length reached: feed
 * the tokens from there on again; there are no logits until then. STILL_E_LIMIT:
 * nothing that short is kept. */
STILL_API still_status still_session_rollback(still_session *s, int length, int *at,
                                              still_error *err);

/* Where a token of the past is, for one head. */
typedef enum still_place {
    STILL_PLACE_WINDOW,  /* exact, since it is recent; with softmax all are */
    STILL_PLACE_SALIENT, /* exact, since its score is high */
    STILL_PLACE_FOLDED,  /* a part of the linear state */
    STILL_PLACE_GONE,    /* nowhere: its window has moved on, and there is no state */
    STILL_PLACES
} still_place;

typedef struct still_kept {
    int heads; /* of the layer that choose for themselves: kv heads, or query heads */
    int cap;   /* most salient tokens of this head; -1: no cap, 0: it keeps none */
    int count[STILL_PLACES]; /* tokens by place; their sum is the length */
} still_kept;

/* What a head of a layer holds of the session's tokens now. place and score have room
 * for still_session_length() tokens; either, and out, may be NULL. score[i] is what the
 * token is ranked by, as the method's score has it: of a salient token the one it was
 * chosen by, of one in the window the one it will be, if that is known already; else
 * NaN. From a GPU the lists are copied. */
STILL_API still_status still_session_kept(const still_session *s, int layer, int head,
                                          uint8_t *place, float *score, still_kept *out,
                                          still_error *err);

/* Bytes of keys, values and states. */
typedef struct still_held {
    size_t bytes;   /* that they may come to take: with caps, at any context */
    size_t used;    /* of these, what its tokens fill now */
    size_t softmax; /* what softmax attention fills with as many tokens */
} still_held;
STILL_API still_status still_session_held(const still_session *s, still_held *out,
                                          still_error *err);

/* ---- Sampling ------------------------------------------------------------ */

typedef struct still_sampler still_sampler;
/* For logits of `vocab` tokens; p->bias is copied. */
STILL_API still_status still_sampler_new(const still_sampler_params *p, int vocab,
                                         still_sampler **out, still_error *err);
STILL_API void still_sampler_free(still_sampler *sp);
/* Chooses a token from logits [vocab]; a tie goes to the lowest id. */
STILL_API still_status still_sampler_sample(still_sampler *sp, const float *logits,
                                            int32_t *id, still_error *err);
/* The same among the tokens whose bits are set (still_matcher_mask): [(vocab + 63) / 64];
 * NULL: all. STILL_E_ARG if none of them can be chosen. */
STILL_API still_status still_sampler_sample_masked(still_sampler *sp,
                                                   const float *logits,
                                                   const uint64_t *bits, int32_t *id,
                                                   still_error *err);
/* The same among those that m, of the same vocab, allows; NULL: all. Greedy sampling
 * mostly needs no mask for it. m is not told (still_matcher_accept). */
STILL_API still_status still_sampler_sample_matched(still_sampler *sp, still_matcher *m,
                                                    const float *logits, int32_t *id,
                                                    still_error *err);
/* Tells the sampler that a token was generated, for all penalties; or that it is in the
 * prompt, for the repeat penalty alone. */
STILL_API void still_sampler_accept(still_sampler *sp, int32_t id);
STILL_API void still_sampler_accept_prompt(still_sampler *sp, int32_t id);

/* ---- Guessing ------------------------------------------------------------ */

/* Guesses what comes next from what followed the same tokens earlier in the conversation
 * (prompt lookup). It watches how often it is right, and guesses only as many tokens as
 * pay for their rows of a pass:
 *
 *     still_lookup_accept(l, id);            each token of prompt and reply, as it is fed
 *     n = still_lookup_guess(l, guess);
 *     still_session_feed_ahead(s, id, guess, n, &rows, &e);
 *     still_lookup_timed(l, rows, seconds);  of that call; may be left out
 *     still_sampler_sample(...);             chooses as ever: the text is the same
 *
 * The last 65,536 tokens are looked back at. */
typedef struct still_lookup still_lookup;
/* most: guesses at a time, up to 31; 0: 15. */
STILL_API still_status still_lookup_new(int most, still_lookup **out, still_error *err);
STILL_API void still_lookup_free(still_lookup *l);
STILL_API void still_lookup_accept(still_lookup *l, int32_t id);
/* Writes guesses of the tokens after the last to guess[`most`]; returns how many. */
STILL_API int still_lookup_guess(const still_lookup *l, int32_t *guess);
/* What a pass of so many rows took (*rows of still_session_feed_ahead): guesses are weighed
 * with what a row costs on this machine. Without it a usual cost is assumed. */
STILL_API void still_lookup_timed(still_lookup *l, int rows, double seconds);
STILL_API void still_lookup_reset(still_lookup *l); /* back to an empty conversation */

/* ---- Perplexity ---------------------------------------------------------- */

typedef struct still_perplexity {
    double nll;     /* sum of -log p */
    uint64_t n;     /* tokens scored */
    double value;   /* exp(nll / n) */
    double stderr_; /* of value, by the delta method over tokens */
    int windows;
} still_perplexity;

/* Perplexity of ids in consecutive windows of ctx tokens, each from an empty session (s
 * is reset, and holds the last window afterwards); the first token of a window is
 * context only. each (may be NULL): [n], log p of every token, NaN where there is none.
 * Progress counts tokens, and *out holds the running value at each call of cb. */
STILL_API still_status still_perplexity_run(still_session *s, const int32_t *ids,
                                            size_t n, int ctx, float *each,
                                            still_progress_fn cb, void *user,
                                            still_perplexity *out, still_error *err);

/* ---- Linearizing --------------------------------------------------------- */

/* Parts of an adapter that can have a learning rate of their own. */
typedef enum still_train_group {
    STILL_GROUP_MAPS,    /* feature maps and their biases */
    STILL_GROUP_SCALARS, /* alpha, window factors */
    STILL_GROUP_GATE,
    STILL_GROUP_LORA,
    STILL_GROUPS
} still_train_group;

/* Projections with low-rank additions, bits of still_train_params.lora_targets. */
enum {
    STILL_LORA_Q = 1,
    STILL_LORA_K = 2,
    STILL_LORA_V = 4,
    STILL_LORA_O = 8,
    STILL_LORA_GATE = 16
};

typedef struct still_train_data {
    /* JSONL or JSON, gzipped or not: records of instruction, input, output, or of text. */
    const char *path;
    double weight; /* share of the sequences; 0: by its size */
} still_train_data;

/* State of a run; passed to the callback after every step. */
typedef struct still_train_progress {
    int stage;            /* 1 or 2 */
    uint64_t step, steps; /* done, of the stage */
    uint64_t tokens;      /* of the stage */
    double loss, norm, lr;
    double relative; /* stage 1: error over the teacher's output, mean over layers */
    double kl;       /* stage 2 with kd */
    double valid_loss, valid_relative; /* NaN where this step did not validate */
    double tokens_per_s, seconds_left; /* of this stage */
    size_t peak_rss;
} still_train_progress;
/* false: save and stop; still_linearize then returns STILL_E_CANCELLED. */
typedef bool (*still_train_fn)(void *user, const still_train_progress *p);

/* Zeros are all defaults but for method, data and out. docs/training.md explains
 * the two stages. */
typedef struct still_train_params {
    size_t size;         /* sizeof(still_train_params) */
    still_method method; /* from still_method_init */
    const still_train_data *data;
    int n_data;
    const char *out;       /* folder to write; must not exist unless resume */
    const char *base_name; /* the model's name for users; written into the adapter */
    const char *start; /* an adapter folder to start from (stage 2 alone); or NULL */
    const char *cache_dir; /* for tokenized data; NULL: out */
    bool resume;           /* continue from the last checkpoint in out */
    int stage;             /* 1, 2; 0: both */
    uint64_t tokens;       /* of each stage; 0: 20 million */
    int seq, batch;        /* ids of a sequence (0: 1024), sequences of a step (0: 8) */
    int micro_batch;       /* sequences computed at once (0: 1) */
    bool mask_prompt;
    double held_out; /* 0: 0.02; negative: none */
    uint64_t seed;
    double lr[3];                  /* [stage]; 0: 1e-2 and 5e-4 */
    double lr_scale[STILL_GROUPS]; /* 0: 1; negative: the group is frozen */
    double warmup;                 /* share of the steps; 0: 0.05 */
    double clip;                   /* norm of the gradient; 0: 1, INFINITY: no limit */
    double beta1, beta2, decay;    /* 0: 0.9, 0.95; none */
    int lora_rank;                 /* 0: 8 */
    double lora_alpha;             /* 0: 16 */
    double lora_dropout;
    unsigned lora_targets; /* 0: all */
    double kd;             /* weight of the distillation term of stage 2 */
    /* Heads and layers with a cap of their own (method.caps) train with this share of
     * it, 0..1, and run with all of it. Training with little kept teaches the model to
     * rely on what is kept. 0: 1 */
    double cap_share;
    bool match_weights;  /* stage 1: cross entropy of attention weights, not outputs */
    bool freeze_maps;    /* stage 2: low-rank additions alone */
    uint64_t save_every; /* steps between checkpoints; 0: about every two minutes */
    uint64_t validate_every; /* steps; 0: ten times a stage */
    still_train_fn each;     /* may be NULL */
    void *user;
    still_progress_fn reading; /* while data is tokenized, in bytes; may be NULL */
    /* One line that a user should see, such as how many records were broken; or
     * NULL. */
    void (*note)(void *user, const char *line);
} still_train_params;

/* What a run will take, measured before it starts. */
typedef struct still_train_plan {
    uint64_t steps[3], tokens[3]; /* [stage] */
    uint64_t trained[3];          /* numbers trained */
    size_t bytes[3];              /* peak memory, weights included */
    double seconds[3];            /* from a measured step of the real thing */
    uint64_t records, broken;     /* of the data */
    char first_broken[256];
    int rank; /* of this process; all of a job have the same plan */
} still_train_plan;

/* Trains an adapter for m and writes it to p->out. m must be a plain model. In a job of
 * several ranks all call this with the same arguments; rank 0 writes and calls p->each.
 * An error that ends all ranks has its text on the rank where it happened, and an empty
 * one on the others. */
STILL_API still_status still_linearize(still_model *m, const still_train_params *p,
                                       still_error *err);
/* Prepares everything, times one sequence of each stage, and writes nothing but the
 * token cache. */
STILL_API still_status still_linearize_plan(still_model *m, const still_train_params *p,
                                            still_train_plan *out, still_error *err);

/* ---- Allocating ---------------------------------------------------------- */

/* Few kv heads look things up, and a session's bytes are best spent on those. Probes
 * (prompts that hide a fact in prose and ask for it) tell which they are; a budget in
 * bytes then decides how many salient tokens each head keeps. */
typedef struct still_allocation {
    int layers, heads;   /* of the model; kv heads of a layer */
    double *gain;        /* [layers, heads]: attention, 0..1, that answers give the fact
                          they repeat, in the model's own softmax attention; mean over
                          probes of the largest of the query heads of a kv head */
    int *cap;            /* [layers, heads]: salient tokens; 0 in layers that keep their
                          own attention */
    int chosen;          /* heads that keep more than the others */
    size_t bytes;        /* of a session whose lists are full */
    still_method method; /* with these caps, for sessions and for still_linearize */
} still_allocation;

typedef struct still_allocate_params {
    size_t size;                /* sizeof(still_allocate_params) */
    const still_method *method; /* whose caps to choose; NULL: what the adapter was
                                   trained for, "still" if there is none */
    int key_bits, value_bits;   /* of salient tokens; 0: as the method has them */
    size_t budget; /* bytes of a session; 0: what the adapter's method takes as it is,
                      and without an adapter what the method takes with one cap for all
                      heads, a linear state and no quantized tokens */
    /* Where the window and the linear state would take more than about half of the
     * budget, the chunk may be halved, down to 16, and a state that no adapter was
     * trained with left out. */
    bool shrink;
    int probes;    /* 0: 24 of about 1200 tokens, a minute on two cores for 135M */
    uint64_t seed; /* of the probes: the same seed, the same caps */
    /* Keeps what the probes said of this model in a file of this folder, and reads it
     * the next time, whatever the budget and the method; NULL: nowhere. A damaged file
     * is replaced. */
    const char *folder;
    still_progress_fn progress; /* probes; may be NULL */
    /* A file in `folder` was damaged or could not be written; may be NULL. */
    void (*note)(void *user, const char *line);
    void *user;
} still_allocate_params;

/* Probes run the plain model on the cpu: on another backend, or with an adapter, the
 * model's files are opened a second time for them. */
STILL_API still_status still_allocate(still_model *m, const still_allocate_params *p,
                                      still_allocation **out, still_error *err);
STILL_API void still_allocation_free(still_allocation *a);

/* ---- Exporting ----------------------------------------------------------- */

/* Zeros are all defaults but for format and path. */
typedef struct still_export_params {
    size_t size; /* sizeof(still_export_params) */
    /* "safetensors": a Hugging Face folder; "gguf": a file NAME.gguf as llama.cpp loads
     * it; both hold the model with the adapter's low-rank additions merged, and run as
     * softmax elsewhere. What other programs have no place for goes beside it:
     * still.json and adapter.safetensors in the folder, NAME.still.gguf beside the
     * file; with them the model is linearized again. "peft": a folder with the low-rank
     * additions alone, as PEFT reads them. "adapter": a folder with the adapter alone,
     * smaller (adapter.gguf), and the card and figures of the folder it was in. */
    const char *format;
    const char *path;    /* what to write; must not exist */
    const char *adapter; /* as in still_model_params; NULL: the plain model */
    /* "f32", "f16", "bf16"; gguf also "q8_0" and "same" (as the base has it). NULL: for
     * safetensors the base's own type, bf16 if it is quantized; for gguf the base's
     * blocks as they are and q8_0 where the merge changed them, f16 if it is not
     * quantized. adapter: "q8_0" (NULL, too) for gates, with f16 for other matrices, or
     * "f16" or "f32" for all. */
    const char *dtype;
    const char *base_name; /* peft, adapter: name of the base; NULL: the adapter's */
    still_progress_fn progress; /* bytes; may be NULL */
    void *user;
} still_export_params;

/* Writes a model for other programs, tensor by tensor, so that memory does not grow
 * with it. Everything is written under temporary names and renamed at the end: on
 * failure nothing is at path. */
STILL_API still_status still_export(const char *model, const still_export_params *p,
                                    still_error *err);

/* ---- Evaluation ---------------------------------------------------------- */

/* Figures of one task at one length. */
typedef struct still_eval_result {
    char task[32];
    char metric[16];        /* the one to compare: "acc", "acc_norm", "match" */
    int length;             /* tokens; 0: the task has none */
    uint64_t n;             /* items */
    double acc, acc_stderr; /* share of right answers, or mean score; 0..1 */
    double acc_norm, acc_norm_stderr; /* ranked by log p per character; NaN: not one
                                         of its figures */
    double perplexity;                /* of the expected words; NaN likewise */
    uint64_t cut;     /* items whose beginning was left out: longer than the limit */
    uint64_t plain;   /* items meant for a chat template that the model does not have */
    uint64_t resumed; /* items taken from the log */
    uint64_t tokens, tokens_alone; /* computed; without shared beginnings */
    double seconds;
    int rank; /* of this process; all of a job have the same figures */
} still_eval_result;

/* One item that has been answered. */
typedef struct still_eval_item {
    const char *record; /* JSON, as in the log */
    uint64_t done, total;
    bool resumed;
    const still_eval_result *running; /* so far */
} still_eval_item;

/* Zeros are all defaults but for tasks and data. */
typedef struct still_eval_params {
    size_t size;             /* sizeof(still_eval_params) */
    const char *const *task; /* names, see still_eval_task_at */
    int n_tasks;
    const char *data;                    /* folder with their files */
    const still_session_params *session; /* ctx: most tokens a model is to see; batch:
                                            tokens of a pass, of many items together
                                            (0: 256, 8192 on a GPU); else, and NULL, as
                                            in still_session_new */
    uint64_t limit;                      /* items of each task; 0: all */
    const int *length; /* of tasks that have lengths; n_lengths 0: their own */
    int n_lengths;
    int samples;    /* of generated tasks; 0: their own */
    uint64_t seed;  /* of generated tasks */
    int shots;      /* worked examples; 0: the task's own, negative: none */
    bool recompute; /* every choice from its first token on: slower, the same figures */
    const char *log; /* JSONL file of records, which also says what is done; or NULL */
    bool (*each)(void *user,
                 const still_eval_item *item); /* may be NULL; false: stop */
    bool (*poll)(void *user); /* asked between passes; may be NULL; false: stop */
    void *user;
} still_eval_params;

/* Runs tasks on a model and writes a result for each task and length to out[0..*n), in
 * order; more than cap are an error. After STILL_E_CANCELLED the log has every item
 * that was answered, and the same call continues from there; *n results are complete.
 * In a job of several ranks (mpirun, torchrun, srun: docs/cluster.md) all call this
 * with the same arguments and share the items; rank 0 writes the log and calls p->each.
 * An error that happened on another rank has an empty text. */
STILL_API still_status still_eval_run(still_model *m, const still_eval_params *p,
                                      still_eval_result *out, int cap, int *n,
                                      still_error *err);
/* Makes the samples of generated tasks (RULER, BABILong) as still_eval_run would, and
 * writes each set to dir/TASK-LENGTH.jsonl with its seed and a checksum. A data folder
 * that holds such a file is read instead of making the set anew. Tasks that read their
 * questions from files are an error. */
STILL_API still_status still_eval_write_datasets(const still_model *m,
                                                 const still_eval_params *p,
                                                 const char *dir, still_error *err);
/* Name of the i-th task, NULL past the last; what it asks, its files in the data
 * folder, separated by spaces, and its own lengths, the last 0, or NULL if it has none
 * (each of the three may be NULL). */
STILL_API const char *still_eval_task_at(int i, const char **summary,
                                         const char **files, const int **lengths);

/* ---- Measuring ----------------------------------------------------------- */

/* What to time. A method runs with all that training would add to the model (feature
 * maps, gates), untrained if the model has no adapter: the time is the same. */
typedef struct still_bench_params {
    size_t size;                         /* sizeof(still_bench_params) */
    const still_session_params *session; /* method, rows of a pass (batch; of prefill),
                                            cache; ctx is not read; NULL: defaults */
    int length; /* prefill: tokens of the prompt; decode: tokens that sessions already
                   hold; train: tokens of a sequence */
    int batch;  /* sequences; decode computes them together, prefill one after the
                   other, a step of training sums over them; 0: 1 */
    int steps;  /* decode, train: how many are timed, after a warm-up; 0: 32 of decode,
                   2 of train */
    int stage;  /* train: 1 or 2 */
    int micro_batch;            /* train: sequences computed at once; 0: 1 */
    uint64_t seed;              /* of ids and synthetic pasts */
    still_progress_fn progress; /* tokens (prefill) or steps, between those that are
                                   timed; may be NULL */
    void *user;
} still_bench_params;

typedef struct still_bench_result {
    double seconds; /* prefill: of all prompts; decode, train: mean of a step. A step
                       of decode that begins a chunk does more work than others; it
                       counts once a chunk */
    double median, fastest, slowest; /* of the steps that were timed; decode: of those
                                        within chunks; prefill: seconds */
    double boundary; /* decode: median of steps that begin a chunk; 0: none does more */
    uint64_t tokens; /* of `seconds` */
    size_t peak;     /* most memory in use: of the GPU, or the process's own */
    size_t state;    /* of that, keys, values and states of all sessions */
} still_bench_result;

/* Each makes its sessions, measures, and frees them; the model must have no others.
 * STILL_E_MEMORY: this length does not fit, and shorter ones can be tried.
 *
 * prefill: prompts of random ids, each from an empty session. decode: sessions are not
 * fed but filled with random numbers, as full as `length` tokens make them, and then
 * take steps together, timed one by one. train: steps of still_linearize on random ids,
 * optimizer included; the model must be a plain one. */
STILL_API still_status still_bench_prefill(still_model *m, const still_bench_params *p,
                                           still_bench_result *out, still_error *err);
STILL_API still_status still_bench_decode(still_model *m, const still_bench_params *p,
                                          still_bench_result *out, still_error *err);
STILL_API still_status still_bench_train(still_model *m, const still_bench_params *p,
                                         still_bench_result *out, still_error *err);

/* ---- Saliency ------------------------------------------------------------ */

/* How far the method's score and another choose the same tokens: means over the chunks
 * that have left the window, but for the first, in which the past is the window. */
typedef struct still_agreement {
    double overlap;     /* of the `select` best tokens of a chunk: the share that both
                           have; select / chunk by chance */
    double correlation; /* Spearman's, of the ranks within a chunk; mean over chunks.
                           NaN if all scores are equal */
    double captured;    /* of the other score's sum over a chunk: the share that lies on
                           the tokens the method chooses */
} still_agreement;

enum { STILL_SCORES_MAX = 8 };

/* What a method knows of the tokens of a text when it chooses those that stay exact,
 * and what it cannot know. Arrays are [layers, heads, tokens], or [layers, heads] of
 * agreements with `local`. */
typedef struct still_saliency {
    int tokens;
    int first_layer, layers; /* those that the method replaces */
    int heads;               /* that choose for themselves: kv heads, or query heads */
    int left;                /* tokens [0, left) have left the window at the end */
    still_method method;     /* chunk, select, cap, score */
    float *local;            /* its own score */
    float *whole;    /* Self-Saliency Score over the whole past, where s3 takes the
                        last `chunk` tokens */
    float *received; /* mean weight, in the softmax over the whole past, that queries
                        give it after it has left the window; NaN from `left` on */
    int32_t *folded; /* the first position that finds it in the linear state; -1: it is
                        exact to the end */
    still_agreement *with_whole, *with_received;
    still_agreement *layer_whole, *layer_received; /* [layers]: means over heads */
    still_agreement mean_whole, mean_received;     /* of all */
    /* With all_scores: what every score says of the same queries and keys, names as
     * --score takes them. */
    int scores;
    const char *score_name[STILL_SCORES_MAX];
    float *by_score; /* [scores, layers, heads, tokens] */
} still_saliency;

typedef struct still_saliency_params {
    size_t size;                /* sizeof(still_saliency_params) */
    const still_method *method; /* read, not kept; NULL: what the adapter was trained
                                   for, "still" if there is none */
    still_progress_fn progress; /* layers; may be NULL */
    void *user;
    bool all_scores; /* also by_score; the layers run with the method's own */
} still_saliency_params;

/* Runs a text of n tokens through the model and measures every layer that the method
 * replaces. A plain model attends as it was pretrained; one with an adapter as it runs,
 * and the whole past is then what its own queries and keys would see of it. n is more
 * than three chunks, so that two leave the window. Time grows with n^2. Backends whose
 * memory is the program's own: cpu, ref. Methods that choose by a score: still. */
STILL_API still_status still_saliency_run(still_model *m, const int32_t *tok, int n,
                                          const still_saliency_params *p,
                                          still_saliency **out, still_error *err);
STILL_API void still_saliency_free(still_saliency *s);

/* ---- Self-tests against golden data -------------------------------------- */

/* One measured quantity of one case. passed = value <= limit. */
typedef struct still_check {
    const char *name; /* "logits", "ids", "logprob mean" ... */
    double value, limit;
    bool passed;
} still_check;

typedef struct still_check_case {
    const char *suite, *name;
    const still_check *check;
    int n_checks;
    bool passed;
} still_check_case;
typedef void (*still_check_fn)(void *user, const still_check_case *c);

typedef struct still_selftest_params {
    size_t size;                     /* sizeof(still_selftest_params) */
    const still_model_params *model; /* NULL: defaults */
    const char *model_path;   /* end-to-end: the model that made the golden data */
    const char *tokenizer[4]; /* tokenizer: files or folders to look for vocabularies */
} still_selftest_params;

/* suite: "models", "end-to-end", "tokenizer", "chat", "templates", "operator" (the hybrid
 * operator) or "baselines" (the methods of other papers), over golden data in dir. Calls
 * cb for each case. The status tells whether the suite could be run; *failed counts cases
 * out of tolerance. */
STILL_API still_status still_selftest_run(const char *suite, const char *dir,
                                          const still_selftest_params *p,
                                          still_check_fn cb, void *user, int *failed,
                                          still_error *err);

/* ---- Reading text -------------------------------------------------------- */

/* Whole text of a file: plain, .jsonl (the "text" fields joined as they are), and
 * either of them gzipped; a packed file may unpack to 64 MiB and 64 times its size. *out
 * is malloc'd and NUL-terminated; free() it. */
STILL_API still_status still_text_read(const char *path, char **out, size_t *n,
                                       still_error *err);

#ifdef __cplusplus
}
#endif
#endif
