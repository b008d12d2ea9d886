/* words.h - what kind of tokens a method keeps: counts of tokens, and shares of classes
 * of words. Classes are told by English word lists and by spelling, token by token of a
 * word: "can" and "not" of "cannot" are one word. */
#ifndef CLI_REPORT_WORDS_H
#define CLI_REPORT_WORDS_H

#include "cli/report/saliency.h"

typedef enum cli_word_class {
    CLI_NEGATION,
    CLI_MODALITY,
    CLI_QUANTIFICATION,
    CLI_NAME, /* a capital inside a sentence */
    CLI_DIGITS,
    CLI_PUNCTUATION,
    CLI_SPACE, /* and line breaks */
    CLI_OTHER_WORD,
    CLI_WORD_CLASSES
} cli_word_class;

typedef struct cli_word {
    char text[48]; /* without spaces around it; "-ing" continues a word */
    cli_word_class class;
    int times;   /* in the text */
    double kept; /* of these: how often it was chosen, mean over layers and heads */
} cli_word;

typedef struct cli_words {
    cli_word *word; /* [n], most often kept first */
    int n;
    /* Shares of all tokens that left the window, and of those chosen. */
    double in_text[CLI_WORD_CLASSES], in_kept[CLI_WORD_CLASSES];
} cli_words;

const char *cli_word_class_name(cli_word_class c);
/* chosen: [s->left], the share of layers and heads that chose a token. */
still_status cli_words_count(const cli_saliency *r, const double *chosen,
                             cli_words *out, still_error *err);
void cli_words_free(cli_words *w);
/* Appends a drawing: the tokens most often kept as a cloud, the classes as bars. */
void cli_words_draw(const cli_saliency *r, const cli_words *w, sti_buf *out);

#endif
