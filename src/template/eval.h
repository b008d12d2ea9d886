/* eval.h - running a template: scopes, calls and the tables of what can be called. */
#ifndef STI_TEMPLATE_EVAL_H
#define STI_TEMPLATE_EVAL_H

#include "template/ast.h"

/* ---- Variables (statement.c) ------------------------------------------------- */

/* A for, a macro and the like open a scope; its variables end with it. */
struct sti_tscope {
    sti_tscope *parent;
    struct sti_tvariable *first;
};
sti_tscope *sti_scope_new(sti_run *r, sti_tscope *parent); /* NULL: failed */
void sti_scope_set(sti_run *r, const sti_tstr *name, sti_tval v);
const sti_tval *sti_scope_find(sti_run *r, const sti_tstr *name);
/* Assigns to a target: a name, a tuple of them, an attribute of a namespace. */
void sti_assign(sti_run *r, const sti_tnode *target, sti_tval v);

/* ---- Calls (call.c) ------------------------------------------------------ */

typedef struct sti_targs {
    sti_tlist *list;
    sti_tdict *named; /* NULL: none */
} sti_targs;

/* self: what a filter, test or method is applied to. With parameters, arg has a value for
 * each, STI_T_MISSING for those left out; without, only `all`. */
typedef sti_tval (*sti_tfunction)(sti_run *r, sti_tval self, const sti_tval *arg,
                                  const sti_targs *all);
typedef struct sti_tbuiltin {
    const char *name;
    const char *parameters; /* "a b c"; NULL: any */
    int required;
    sti_tfunction fn;
} sti_tbuiltin;
enum { STI_MOST_PARAMETERS = 6 };

typedef struct sti_ttable {
    const sti_tbuiltin *row;
    size_t n;
} sti_ttable;
#define STI_TABLE(rows) ((sti_ttable){rows, sizeof(rows) / sizeof *(rows)})

const sti_tbuiltin *sti_table_find(sti_ttable t, const sti_tstr *name);
sti_targs sti_eval_arguments(sti_run *r, const sti_tnode *first);
sti_tval sti_call_builtin(sti_run *r, const sti_tbuiltin *b, sti_tval self,
                          const sti_targs *all);
sti_tval sti_call(sti_run *r, sti_tval what, const sti_targs *all);
/* By name; unknown ones fail. */
sti_tval sti_filter(sti_run *r, const sti_tstr *name, sti_tval self,
                    const sti_targs *all);
bool sti_test(sti_run *r, const sti_tstr *name, sti_tval self, const sti_targs *all);

sti_ttable sti_text_filters(void);   /* filters_text.c */
sti_ttable sti_list_filters(void);   /* filters_list.c */
sti_ttable sti_tests(void);          /* tests.c */
sti_ttable sti_string_methods(void); /* methods_string.c */
sti_ttable sti_functions(void);      /* functions.c */
/* The method of a value (functions.c); NULL: it has none of that name, or failed. */
const sti_tbuiltin *sti_method_find(sti_run *r, sti_tval self, const sti_tstr *name);

/* Arguments that must be whole numbers, strings or booleans; `otherwise` if missing. */
int64_t sti_arg_int(sti_run *r, sti_tval v, int64_t otherwise);
const sti_tstr *sti_arg_string(sti_run *r,
                               sti_tval v); /* NULL: missing or none; failed */
bool sti_arg_true(sti_run *r, sti_tval v, bool otherwise);
/* str.strip; set: a string of characters, or missing (chars.c). */
sti_tval sti_t_stripped(sti_run *r, const sti_tstr *s, sti_tval set, bool left,
                        bool right);

/* Python's "..." % value and "...".format(...) (format.c). */
sti_tval sti_format_percent(sti_run *r, const sti_tstr *format, const sti_targs *all);
sti_tval sti_format_braces(sti_run *r, const sti_tstr *format, const sti_targs *all);

/* ---- Expressions (expression.c, operators.c) ------------------------------ */

sti_tval sti_eval(sti_run *r, const sti_tnode *n);
sti_tval sti_attribute(sti_run *r, sti_tval of, const sti_tstr *name,
                       const sti_tnode *why);
sti_tval sti_item(sti_run *r, sti_tval of, sti_tval key, const sti_tnode *why);
sti_tval sti_slice(sti_run *r, sti_tval of, sti_tval from, sti_tval to, sti_tval step);
sti_tval sti_binary(sti_run *r, int op, sti_tval a, sti_tval b);
bool sti_compare(sti_run *r, int op, sti_tval a, sti_tval b);
/* Fails with the reason why v is undefined. */
sti_tval sti_fail_undefined(sti_run *r, sti_tval v);

/* ---- Statements (statement.c, loop.c) ------------------------------------- */

typedef enum sti_flow { STI_FLOW_ON, STI_FLOW_BREAK, STI_FLOW_CONTINUE } sti_flow;
sti_flow sti_exec(sti_run *r, const sti_tnode *first);
/* The output of statements as a string, in a scope of its own. */
sti_tval sti_capture(sti_run *r, const sti_tnode *first);
sti_tval sti_call_macro(sti_run *r, const sti_tmacro *m, const sti_targs *all);
void sti_exec_for(sti_run *r, const sti_tnode *n);
sti_tval sti_loop_attribute(const sti_tloop *loop, const sti_tstr *name);
sti_tval sti_loop_recurse(sti_run *r, const sti_tloop *loop, const sti_targs *all);
sti_tval sti_loop_cycle(sti_run *r, sti_tloop *loop, const sti_targs *all);
sti_tval sti_loop_changed(sti_run *r, sti_tloop *loop, const sti_targs *all);

#endif
