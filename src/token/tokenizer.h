/* tokenizer.h - the tokenizer object, shared by the files of this folder.
 *
 * Loaders fill vocabulary, merges and settings; sti_tokenizer_finish builds the rest.
 * From then on nothing changes, so one tokenizer serves any number of threads. */
#ifndef STI_TOKEN_TOKENIZER_H
#define STI_TOKEN_TOKENIZER_H

#include "token/bpe.h"
#include "token/pieces.h"
#include "token/split.h"
#include "token/token.h"
#include "token/trie.h"

/* Where SentencePiece's leading space goes: every text fragment between special
 * tokens, or only one that starts the text. */
typedef enum sti_prefix {
    STI_PREFIX_NONE,
    STI_PREFIX_FIRST,
    STI_PREFIX_ALL
} sti_prefix;

enum { STI_STRIP_LEFT = 1, STI_STRIP_RIGHT = 2 }; /* of added tokens */

struct still_tokenizer {
    sti_vocab v;
    int n; /* public vocabulary; v.n may be larger */
    sti_bpe bpe;
    bool spm;         /* SentencePiece: characters, spaces inside; else byte-level */
    sti_trie special; /* matched before anything else */
    unsigned char *strip; /* [n] spaces an added token swallows; NULL: none do */

    sti_split split;     /* byte-level */
    bool nfc;            /* text is brought into NFC first */
    bool ignore_merges;  /* a piece that is a token is that token */
    bool space_in_front; /* a space is put before a text that has none */

    sti_prefix prefix; /* SentencePiece */
    bool prefix_once;  /* ... and only if there is no space yet */
    bool each_space;   /* every space starts a word of its own */
    bool user_inside;  /* USER tokens are matched after the leading space is added */
    sti_trie user;     /* those tokens then; otherwise they are in `special` */
    bool words_apart;  /* no token has a space after a non-space: words are separate */
    bool fuse_unknown; /* a run of unknown characters is one unknown token */

    int32_t unknown, bos, eos; /* -1: none */
    bool add_bos;
    int32_t *end; /* [n_end] ids that end generation */
    size_t n_end;
    char *chat_template;
    sti_pieces_slot *pieces; /* made when it is needed */
};

still_tokenizer *sti_tokenizer_new(void);
/* Some files call <|im_end|> and its like a word of the user's. Content must not hold it
 * as a token, and no grammar allows it. */
bool sti_looks_like_control(const char *p, size_t n);
/* How text is searched for a token, where that is not how it is decoded. */
typedef struct sti_added {
    const char *text; /* NULL: as it is decoded */
    bool inside;      /* in text with spaces in place (user_inside) */
} sti_added;

/* Builds the look-ups from the vocabulary's tokens and kinds, which are final from
 * here on. Merges come after it, since they refer to tokens. added: [n], or NULL. */
still_status sti_tokenizer_index(still_tokenizer *tk, const sti_added *added,
                                 still_error *err);
/* Derives merges from the order of whole tokens, which is that of their ids: tiktoken. */
still_status sti_tokenizer_merges_by_id(still_tokenizer *tk, still_error *err);
/* Derives merges from the scores of whole tokens (higher first): SentencePiece. */
still_status sti_tokenizer_merges_by_score(still_tokenizer *tk, const float *score,
                                           still_error *err);
/* Checks ids and finds the tokens that end generation by their names. */
still_status sti_tokenizer_finish(still_tokenizer *tk, still_error *err);
still_status sti_tokenizer_add_end(still_tokenizer *tk, int32_t id, still_error *err);
/* The id of a special or user token by its text; -1: none. */
int32_t sti_tokenizer_special_id(const still_tokenizer *tk, const char *text, size_t n);
/* Adds a SentencePiece token as files spell it: U+2581 for a space, <0xE2> bytes. */
still_status sti_tokenizer_add_spm(still_tokenizer *tk, const char *p, size_t n,
                                   sti_kind kind, still_error *err);
/* Decodes n characters of padded base64 into out (3 bytes for 4); false if invalid. */
bool sti_bytes_of_base64(const char *p, size_t n, char *out, size_t *n_out);
/* Adds a byte-level token as its bytes. */
still_status sti_tokenizer_add_bytes(still_tokenizer *tk, const char *p, size_t n,
                                     still_error *err);
/* An error unless each of the 256 bytes is a token; `what` names the file. */
still_status sti_tokenizer_check_bytes(const still_tokenizer *tk, const char *what,
                                       still_error *err);
/* Adds a byte-level token spelled in GPT-2's alphabet. */
still_status sti_tokenizer_add_gpt2(still_tokenizer *tk, const char *p, size_t n,
                                    sti_kind kind, still_error *err);
/* Adds a merge of two such tokens to the table, which has room for it. */
still_status sti_tokenizer_add_merge(still_tokenizer *tk, sti_str left, sti_str right,
                                     uint32_t rank, still_error *err);

/* One per kind of file. On success the tokenizer lacks only sti_tokenizer_finish. */
still_status sti_tokenizer_load_gguf(still_tokenizer *tk, const sti_store *s,
                                     still_error *err);
still_status sti_tokenizer_load_json(still_tokenizer *tk, const char *p, size_t n,
                                     still_error *err);
still_status sti_tokenizer_load_spm(still_tokenizer *tk, const char *p, size_t n,
                                    still_error *err);
/* rule: the name of the splitting rule; NULL: Llama 3's, if there are as many ranks. */
still_status sti_tokenizer_load_tiktoken(still_tokenizer *tk, const char *p, size_t n,
                                         const char *rule, still_error *err);
still_status sti_tokenizer_load_tekken(still_tokenizer *tk, const char *p, size_t n,
                                       still_error *err);
/* tokenizer_config.json, generation_config.json and chat_template.jinja of a folder,
 * where they are. */
still_status sti_tokenizer_load_settings(still_tokenizer *tk, const char *folder,
                                         still_error *err);
/* Where a tokenizer's file leaves something open; NULL: nothing is known. */
typedef struct sti_tokenizer_hints {
    const char *settings; /* folder of settings files */
    const char *split;    /* name of the splitting rule, for tiktoken ranks only */
} sti_tokenizer_hints;

/* Finds out which of tokenizer.json, tekken.json, SentencePiece and tiktoken the n bytes
 * are, and loads and finishes a tokenizer. */
still_status sti_tokenizer_from_bytes(const char *p, size_t n,
                                      const sti_tokenizer_hints *hints,
                                      still_tokenizer **out, still_error *err);

#endif
