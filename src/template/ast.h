/* ast.h - a template as a tree, and how it is read: the lexer cuts the text into tokens,
 * the parser makes nodes. Both live in the template's arena. */
#ifndef STI_TEMPLATE_AST_H
#define STI_TEMPLATE_AST_H

#include "template/value.h"

/* ---- Tokens (lexer.c) ---------------------------------------------------- */

typedef enum sti_ttoken_kind {
    STI_TOK_END, /* of the template */
    STI_TOK_DATA,
    STI_TOK_BLOCK_BEGIN,
    STI_TOK_BLOCK_END,
    STI_TOK_PRINT_BEGIN,
    STI_TOK_PRINT_END,
    STI_TOK_NAME,
    STI_TOK_STRING, /* with its quotes */
    STI_TOK_INT,
    STI_TOK_REAL,
    STI_TOK_OPERATOR /* op: the character; doubled ones below */
} sti_ttoken_kind;

enum { /* operators of two characters */
       STI_OP_EQUAL = 256,
       STI_OP_UNEQUAL,
       STI_OP_LESS_EQUAL,
       STI_OP_GREATER_EQUAL,
       STI_OP_POWER,
       STI_OP_FLOOR,
       STI_OP_IN, /* of comparisons; a name for the lexer */
       STI_OP_NOT_IN
};

typedef struct sti_ttoken {
    sti_ttoken_kind kind;
    int op;
    uint32_t at, n; /* in the text */
} sti_ttoken;

/* ---- Nodes (parse.c, parse_expression.c) --------------------------------- */

typedef enum sti_tnode_kind {
    /* expressions */
    STI_N_CONST,
    STI_N_NAME,
    STI_N_LIST,  /* list */
    STI_N_TUPLE, /* list */
    STI_N_DICT,  /* list: key, value, key, value ... */
    STI_N_ATTRIBUTE,
    STI_N_ITEM,  /* a[b] */
    STI_N_SLICE, /* [a:b:c] */
    STI_N_CALL,  /* a(list) */
    STI_N_FILTER,
    STI_N_TEST,
    STI_N_NOT,
    STI_N_MINUS,
    STI_N_PLUS,
    STI_N_AND,
    STI_N_OR,
    STI_N_BINARY,  /* a op b */
    STI_N_CONCAT,  /* list */
    STI_N_COMPARE, /* a, then list of OPERAND */
    STI_N_OPERAND, /* op a */
    STI_N_CHOICE,  /* b if a else c */
    STI_N_ARGUMENT,
    /* statements */
    STI_N_DATA,
    STI_N_PRINT,
    STI_N_IF, /* list of BRANCH */
    STI_N_BRANCH,
    STI_N_FOR, /* for a in b if c: list, else other */
    STI_N_SET, /* a = b */
    STI_N_SET_BLOCK,
    STI_N_MACRO,        /* name(other): list */
    STI_N_CALL_BLOCK,   /* a is the call; (other): list */
    STI_N_FILTER_BLOCK, /* a is the filter */
    STI_N_WITH,         /* other: SETs */
    STI_N_SCOPE,
    STI_N_BREAK,
    STI_N_CONTINUE
} sti_tnode_kind;

enum { STI_ARG_PLAIN, STI_ARG_NAMED, STI_ARG_LIST, STI_ARG_DICT }; /* op of ARGUMENT */

struct sti_tnode {
    sti_tnode_kind kind;
    int op; /* operator; FOR: recursive; MACRO: reads varargs 1, kwargs 2, caller 4 */
    uint32_t at;    /* offset in the text */
    int depth;      /* of the tree below */
    sti_tval value; /* CONST, DATA; the name of NAME, ATTRIBUTE, FILTER, MACRO, ... */
    sti_tnode *a, *b, *c;
    sti_tnode *list, *other; /* chained by next */
    sti_tnode *next;
};

struct sti_template {
    sti_arena mem;
    char *text; /* newlines are \n, the last one is gone; UTF-8 */
    size_t n;
    sti_ttoken *token;
    size_t n_tokens;
    sti_tnode *body;
};

/* "line L, column C: text"; code. */
still_status sti_template_fail(const sti_template *t, uint32_t at, still_status code,
                               const char *text, still_error *err);
/* Fills t->token from t->text. */
still_status sti_template_lex(sti_template *t, still_error *err);

/* The parser. As in a run, the first failure stays, and every function then returns a
 * node at once. */
typedef struct sti_tparser {
    sti_template *t;
    const sti_ttoken *token; /* the current one */
    still_error *err;
    still_status status;
    bool failed;
    int depth;
    unsigned reads;  /* names of the macro being read: varargs 1, kwargs 2, caller 4 */
    int loops;       /* that break and continue may mean */
    sti_tnode spare; /* what functions return after failure */
} sti_tparser;

sti_tnode *sti_parse_fail(sti_tparser *p, still_status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
sti_tnode *sti_parse_node(sti_tparser *p, sti_tnode_kind kind);
void sti_parse_adopt(sti_tparser *p, sti_tnode *parent, const sti_tnode *child);
bool sti_parse_deeper(sti_tparser *p);
bool sti_parse_is_op(const sti_tparser *p, int op);
bool sti_parse_is_name(const sti_tparser *p, const char *name);
bool sti_parse_skip_op(sti_tparser *p, int op);
bool sti_parse_skip_name(sti_tparser *p, const char *name);
void sti_parse_expect_op(sti_tparser *p, int op);
sti_tval sti_parse_name(sti_tparser *p); /* takes the name that must be here */

sti_tnode *sti_parse_expression(sti_tparser *p);
/* Expressions with commas are a tuple. choice: `a if b else c` is allowed. */
sti_tnode *sti_parse_tuple(sti_tparser *p, bool choice);
sti_tnode *sti_parse_target(sti_tparser *p, bool attributes); /* of set and for */
/* Filters after a value; first: the name is here without a |. */
sti_tnode *sti_parse_filters(sti_tparser *p, sti_tnode *value, bool first);

#endif
