/* tests.c - what stands behind `is`. */
#include <string.h>

#include "template/eval.h"

#define TEST(name)                                                                     \
    static sti_tval name(sti_run *r, sti_tval v, const sti_tval *arg,                  \
                         const sti_targs *all)
#define UNUSED (void)r, (void)v, (void)arg, (void)all

TEST(is_defined)
{
    UNUSED;
    return sti_t_bool(v.kind != STI_T_UNDEFINED);
}

TEST(is_undefined)
{
    UNUSED;
    return sti_t_bool(v.kind == STI_T_UNDEFINED);
}

TEST(is_none)
{
    UNUSED;
    return sti_t_bool(v.kind == STI_T_NONE);
}

TEST(is_boolean)
{
    UNUSED;
    return sti_t_bool(v.kind == STI_T_BOOL);
}

TEST(is_true)
{
    UNUSED;
    return sti_t_bool(v.kind == STI_T_BOOL && v.u.b);
}

TEST(is_false)
{
    UNUSED;
    return sti_t_bool(v.kind == STI_T_BOOL && !v.u.b);
}

TEST(is_integer)
{
    UNUSED;
    return sti_t_bool(v.kind == STI_T_INT);
}

TEST(is_float)
{
    UNUSED;
    return sti_t_bool(v.kind == STI_T_REAL);
}

TEST(is_number)
{
    UNUSED;
    return sti_t_bool(sti_t_number(v));
}

TEST(is_string)
{
    UNUSED;
    return sti_t_bool(v.kind == STI_T_STRING);
}

TEST(is_mapping)
{
    UNUSED;
    return sti_t_bool(v.kind == STI_T_DICT);
}

TEST(is_iterable)
{
    UNUSED;
    return sti_t_bool(v.kind == STI_T_DICT || v.kind == STI_T_LIST ||
                      v.kind == STI_T_STRING || v.kind == STI_T_UNDEFINED ||
                      v.kind == STI_T_LOOP);
}

TEST(is_sequence)
{
    UNUSED;
    return sti_t_bool(v.kind == STI_T_DICT || v.kind == STI_T_STRING ||
                      v.kind == STI_T_UNDEFINED ||
                      (v.kind == STI_T_LIST && v.u.l->shape <= STI_T_RANGE));
}

TEST(is_callable)
{
    UNUSED;
    return sti_t_bool(v.kind == STI_T_MACRO || v.kind == STI_T_METHOD ||
                      v.kind == STI_T_FUNCTION || v.kind == STI_T_JOINER ||
                      v.kind == STI_T_LOOP || v.kind == STI_T_UNDEFINED);
}

TEST(is_same)
{
    UNUSED;
    const sti_tval o = arg[0];
    if (v.kind != o.kind) return sti_t_bool(false);
    return sti_t_bool(v.kind == STI_T_LIST || v.kind == STI_T_DICT ||
                              v.kind == STI_T_NAMESPACE
                          ? v.u.d == o.u.d
                          : sti_t_equal(r, v, o));
}

TEST(is_equal)
{
    UNUSED;
    return sti_t_bool(sti_compare(r, STI_OP_EQUAL, v, arg[0]));
}

TEST(is_unequal)
{
    UNUSED;
    return sti_t_bool(sti_compare(r, STI_OP_UNEQUAL, v, arg[0]));
}

TEST(is_less)
{
    UNUSED;
    return sti_t_bool(sti_compare(r, '<', v, arg[0]));
}

TEST(is_less_equal)
{
    UNUSED;
    return sti_t_bool(sti_compare(r, STI_OP_LESS_EQUAL, v, arg[0]));
}

TEST(is_greater)
{
    UNUSED;
    return sti_t_bool(sti_compare(r, '>', v, arg[0]));
}

TEST(is_greater_equal)
{
    UNUSED;
    return sti_t_bool(sti_compare(r, STI_OP_GREATER_EQUAL, v, arg[0]));
}

TEST(is_in)
{
    UNUSED;
    return sti_t_bool(sti_compare(r, STI_OP_IN, v, arg[0]));
}

static sti_tval divides(sti_run *r, sti_tval v, sti_tval by, int64_t rest)
{
    const sti_tval m = sti_binary(r, '%', v, by);
    return sti_t_bool(!r->failed && sti_t_equal(r, m, sti_t_int(rest)));
}

TEST(is_odd)
{
    UNUSED;
    return divides(r, v, sti_t_int(2), 1);
}

TEST(is_even)
{
    UNUSED;
    return divides(r, v, sti_t_int(2), 0);
}

TEST(is_divisible)
{
    UNUSED;
    return divides(r, v, arg[0], 0);
}

/* Some letter has this case, and none has another. */
TEST(is_lower)
{
    UNUSED;
    return sti_t_bool(
        sti_t_matches(r, sti_t_str(r, v), "\\A(?!.*[\\p{Lu}\\p{Lt}]).*\\p{Ll}") > 0);
}

TEST(is_upper)
{
    UNUSED;
    return sti_t_bool(
        sti_t_matches(r, sti_t_str(r, v), "\\A(?!.*[\\p{Ll}\\p{Lt}]).*\\p{Lu}") > 0);
}

TEST(is_filter)
{
    UNUSED;
    const sti_tstr *s = sti_t_str(r, v);
    return sti_t_bool(sti_table_find(sti_text_filters(), s) ||
                      sti_table_find(sti_list_filters(), s));
}

TEST(is_test)
{
    UNUSED;
    return sti_t_bool(sti_table_find(sti_tests(), sti_t_str(r, v)) != NULL);
}

TEST(is_escaped)
{
    UNUSED;
    return sti_t_bool(v.kind == STI_T_STRING && v.u.s->safe);
}

static const sti_tbuiltin rows[] = {
    {"defined", "", 0, is_defined},
    {"undefined", "", 0, is_undefined},
    {"none", "", 0, is_none},
    {"boolean", "", 0, is_boolean},
    {"true", "", 0, is_true},
    {"false", "", 0, is_false},
    {"integer", "", 0, is_integer},
    {"float", "", 0, is_float},
    {"number", "", 0, is_number},
    {"string", "", 0, is_string},
    {"mapping", "", 0, is_mapping},
    {"iterable", "", 0, is_iterable},
    {"sequence", "", 0, is_sequence},
    {"callable", "", 0, is_callable},
    {"sameas", "other", 1, is_same},
    {"eq", "other", 1, is_equal},
    {"==", "other", 1, is_equal},
    {"equalto", "other", 1, is_equal},
    {"ne", "other", 1, is_unequal},
    {"!=", "other", 1, is_unequal},
    {"lt", "other", 1, is_less},
    {"<", "other", 1, is_less},
    {"lessthan", "other", 1, is_less},
    {"le", "other", 1, is_less_equal},
    {"<=", "other", 1, is_less_equal},
    {"gt", "other", 1, is_greater},
    {">", "other", 1, is_greater},
    {"greaterthan", "other", 1, is_greater},
    {"ge", "other", 1, is_greater_equal},
    {">=", "other", 1, is_greater_equal},
    {"in", "seq", 1, is_in},
    {"odd", "", 0, is_odd},
    {"even", "", 0, is_even},
    {"divisibleby", "num", 1, is_divisible},
    {"lower", "", 0, is_lower},
    {"upper", "", 0, is_upper},
    {"filter", "", 0, is_filter},
    {"test", "", 0, is_test},
    {"escaped", "", 0, is_escaped},
};

sti_ttable sti_tests(void)
{
    return STI_TABLE(rows);
}
