/* The language of chat templates: what Jinja2 3.1, set up as transformers does, makes of
 * the same text; where content goes; and limits on hostile templates. */
#include "../run.h"

#include <string.h>

#include "template/template.h"

static const char VARIABLES[] =
    "{\"a\": \"Hello World\", \"n\": 5, \"neg\": -7, \"z\": null, \"t\": true,"
    "\"l\": [3, 1, 2], \"d\": {\"k\": 1, \"x\": \"y\"}, \"u\": \"Z\\u00fcrich\","
    "\"messages\": [{\"role\": \"user\", \"content\": \"<|x|>\"},"
    "{\"role\": \"im_end\", \"content\": \"\"}]}";

static still_status run(const char *text, still_rendering *r, still_error *err)
{
    static const struct tm now = {.tm_year = 126, .tm_mon = 6, .tm_mday = 26};
    json_t *variables;
    sti_template *t;
    *r = (still_rendering){0};
    *err = (still_error){0};
    assert_int_equal(
        sti_json_read("variables", VARIABLES, sizeof VARIABLES - 1, 0, &variables, err),
        STILL_OK);
    const sti_template_input in = {variables, "<s>", "</s>", &now};
    still_status st = sti_template_parse(text, strlen(text), &t, err);
    if (st == STILL_OK) st = sti_template_render(t, &in, r, err);
    sti_template_free(t);
    json_decref(variables);
    return st;
}

static void test_like_jinja2(void **state)
{
    (void)state;
    static const char *const pair[][2] = {
        {"  {% if t %}\n a\n  {% endif %}\nb\n", " a\nb"},
        {"a {%- if t -%} b {%- endif -%} c", "abc"},
        {"a {%+ if t %} b {% endif +%}\n c", "a  b \n c"},
        {"x {#- c -#} y{# d #}\nz", "xyz"},
        {"{% raw %}{{ x }}{% endraw %}!", "{{ x }}!"},
        {"{% for i in l %}{{ i }}{{ loop.index }}{{ loop.last }} {% endfor %}",
         "31False 12False 23True "},
        {"{% for i in l if i > 1 %}{{ i }}/{{ loop.length }} {% else %}-{% endfor %}",
         "3/2 2/2 "},
        {"{% set x = 1 %}{% for i in l %}{% set x = i %}{% endfor %}{{ x }}", "1"},
        {"{% set s = namespace(x=1) %}{% for i in l %}{% set s.x = s.x + i %}{% endfor "
         "%}{{ s.x }}",
         "7"},
        {"{% macro f(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1) }} {{ "
         "f(b=5, a=4) }}",
         "121 454"},
        {"{% macro m() %}[{{ caller(3) }}]{% endmacro %}{% call(x) m() %}in{{ x }}{% "
         "endcall %}",
         "[in3]"},
        {"{% set x | upper %} h{{ n }} {% endset %}[{{ x }}]", "[ H5 ]"},
        {"{{ neg // 2 }} {{ neg % 3 }} {{ n / 2 }} {{ 2 ** 10 }}", "-4 2 2.5 1024"},
        {"{{ [1, 'it\\'s', none, 1e16, (2,)] }}", "[1, \"it's\", None, 1e+16, (2,)]"},
        {"{{ u[::-1] }} {{ u|length }} {{ u[1].upper() }}", "hcir\xC3\xBCZ 6 \xC3\x9C"},
        {"{{ d|tojson }}{{ l|tojson(indent=1) }}",
         "{\"k\": 1, \"x\": \"y\"}[\n 3,\n 1,\n 2\n]"},
        {"{{ ' a  b c '.split(None, 1) }}{{ 'a,b,c'.rsplit(',', 1) }}",
         "['a', 'b c ']['a,b', 'c']"},
        {"{{ '%05.1f|%-3s|' % (2.55, 'x') }}{{ '{:>4}{:,}'.format('a', 1234567) }}",
         "002.5|x  |   a1,234,567"},
        {"{{ messages|selectattr('role', 'eq', 'user')|map(attribute='content')|join "
         "}}",
         "<|x|>"},
        {"{{ 'abc' * 5 }}{{ 'abc' * 1 }}{{ 'abc' * -1 }}{{ '' * 9 }}",
         "abcabcabcabcabcabc"},
        {"{{ nope }}{{ nope is defined }}{{ nope|default('D') }}", "FalseD"},
        {"{{ 'x<' + ('<'|safe) }}{{ a|indent(2, true) }}", "x&lt;<  Hello World"},
        {"{{ strftime_now('%d %b %Y') }}{{ bos_token }}", "26 Jul 2026<s>"},
        {"{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 "
         "%}{% break %}{% endif %}{{ i }}{% endfor %}",
         "013"},
        /* for: else where no item came to its end, not only where there was none */
        {"{% for i in l %}{{ i }}{% break %}{% else %}E{% endfor %}", "3E"},
        {"{% for i in l %}{% if i < 3 %}{% continue %}{% endif %}{{ i }}{% else %}E{% "
         "endfor %}",
         "3"},
        {"{{ range(4)[1:] == range(1, 4) }}{{ range(2) == [0, 1] }}{{ range(3)[-1] }}",
         "TrueFalse2"},
        {"{{ d.keys() }} {{ {'a': 1}.items() }} {{ d.keys()[0] is defined }}{{ "
         "d.keys() is sequence }}{{ d.values()|length }}",
         "dict_keys(['k', 'x']) dict_items([('a', 1)]) FalseFalse2"},
        {"{% for g in [{'r': 'b', 'i': 1}, {'r': 'a'}, {'r': 'B'}]|groupby('r') %}{{ "
         "g.grouper }}{{ g.list|length }}{{ g[0] }}{{ g[:1] }} {% endfor %}",
         "a1a('a',) b2b('b',) "},
        {"{{ [{'a': 2, 'b': 1}, {'a': 1, 'b': 2}, {'a': 1, 'b': 1}]"
         "|sort(attribute='a,b')|map(attribute='b')|list }}",
         "[1, 2, 1]"},
        {"{{ [none, none]|sort }}{{ [{}, {}]|sort(attribute='q')|length }}",
         "[None, None]2"},
        {"{{ [{'t': {'i': 7}}, {}]|map(attribute='t.i', default='D')|list }}",
         "[7, 'D']"},
        {"{{ l|select|reverse|length }}{{ [1, 2]|slice(2, 0)|list }}",
         "3[[1, 0], [2, 0]]"},
        {"{{ true|abs }} {{ 1 // 0.1 }} {{ -4.0 % 2 }} {{ -0.0 }} {{ -7.5 // 2 }}",
         "1 9.0 0.0 -0.0 -4.0"},
        {"{{ 'a1b'|replace(1, 2)|replace(none, 0) }}{{ 'a.b, \u00e9c'|wordcount }}",
         "a2b3"},
        {"{{ 'stra\u00dfe'|upper }} {{ '\u00df'.capitalize() }}", "STRASSE Ss"},
        {"{{ '\u3001'.isalpha() }}{{ '\u4e00\u00fc'.isalpha() }}{{ '\u0663'.isdigit() "
         "}}{{ '\u00bd'.isnumeric() }}{{ '\u00bd'.isdecimal() }}{{ 'aB'.islower() }}{{ "
         "'a1'.islower() }}{{ '1'.isupper() }}{{ ' \t'.isspace() }}{{ ''.isspace() }}",
         "FalseTrueTrueTrueFalseFalseTrueFalseTrueFalse"},
        {"{{ 'abca'.rindex('a') }}{{ nope is callable }}{{ 'a' % [1] }}", "3Truea"},
        {"{{ [a|safe, 'b'] }}{{ 'x<'|safe|list }}{{ a|safe is escaped }}{{ "
         "[('b'|escape).rjust(3), ('c'|safe).zfill(2)] }}",
         "[Markup('Hello World'), 'b']['x', '<']True[Markup('  b'), Markup('0c')]"},
        {"{{ -0.25|round(0, 'ceil') }} {{ (1, 2)|truncate(9) }} {{ d|attr('items') is "
         "callable }}{{ d|attr('k') is defined }}",
         "0.0 (1, 2) TrueFalse"},
        {"{% macro f(p, q=2) %}{{ kwargs }}{% endmacro %}{{ f(1, p=2) }}{{ f.arguments "
         "}}",
         "{'p': 2}('p', 'q')"},
        {"{% macro f() %}{% macro g() %}{{ varargs }}{% endmacro %}{{ g(7) }}{% "
         "endmacro %}{{ f(1) }}",
         "(7,)"},
        {"{{ '\u01c5 aB\u00df'.swapcase() }} {{ '\u0130'|lower }} {{ "
         "'A\u00e9 Bc'.istitle() }}{{ 'aB'.istitle() }}{{ 'a1_'.isidentifier() }}{{ "
         "'1a'.isidentifier() }}{{ ''.isascii() }}{{ u.isascii() }}",
         "\xC7\x85 AbSS i\xCC\x87 TrueFalseTrueFalseTrueFalse"},
        {"a{#", "a"},
    };
    for (size_t i = 0; i < sizeof pair / sizeof *pair; i++) {
        still_rendering r;
        still_error err;
        if (run(pair[i][0], &r, &err)) fail_msg("%s: %s", pair[i][0], err.text);
        assert_string_equal(r.text, pair[i][1]);
        still_rendering_free(&r);
    }
}

/* Marks follow strings through whatever is done to them. */
static void test_marks(void **state)
{
    (void)state;
    static const char *const pair[][2] = {
        /* template, marks: c content, t the template's */
        {"ab{{ a[:2] }}c", "ttcct"},
        {"{{ '<' + d.x.upper() + '>' }}", "tct"},
        {"{{ [d.x]|tojson }}", "ttctt"},
        {"{{ 'a-b'.replace('-', d.x) }}", "tct"},
        {"{{ '%s!' % d.x }}{{ '{}'.format(d.x) }}", "ctc"},
        {"{% set v %}{{ d.x }}.{% endset %}{{ v * 2 }}", "ctct"},
        {"{% set v %}{{ d.x }}..{% endset %}{{ v * 5 }}{{ v * 0 }}", "cttcttcttcttctt"},
        {"{{ messages[0].role }}{{ messages[1].role }}", "ttttcccccc"},
        {"{{ n }}{{ eos_token }}", "ttttt"},
    };
    for (size_t i = 0; i < sizeof pair / sizeof *pair; i++) {
        still_rendering r;
        still_error err;
        if (run(pair[i][0], &r, &err)) fail_msg("%s: %s", pair[i][0], err.text);
        assert_int_equal(r.n, strlen(pair[i][1]));
        for (size_t k = 0; k < r.n; k++)
            assert_int_equal(r.content[k], pair[i][1][k] == 'c');
        still_rendering_free(&r);
    }
}

static void test_errors(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        still_status status;
        const char *says;
    } bad[] = {
        {"\n{{ a|nothing }}", STILL_E_UNSUPPORTED, "line 2, column 6: unknown filter"},
        {"{{ a is nothing }}", STILL_E_UNSUPPORTED, "unknown test"},
        {"{% include 'x' %}", STILL_E_UNSUPPORTED, "unknown statement 'include'"},
        {"{{ nope.x }}", STILL_E_FORMAT, "'nope' is undefined"},
        {"{{ l.append(1) }}", STILL_E_UNSUPPORTED, "would change a list"},
        {"{% if t %}", STILL_E_FORMAT, "endif"},
        {"{{ a", STILL_E_FORMAT, "no end"},
        {"{{ (a] }}", STILL_E_FORMAT, "bracket"},
        {"{{ 1 + 'a' }}", STILL_E_FORMAT, "an integer and a string"},
        {"{{ raise_exception('no') }}", STILL_E_ARG, "column 4: no"},
        {"{{ 'a' % 1 }}", STILL_E_FORMAT, "takes 0 of 1"},
        {"{{ n[1:] }}", STILL_E_FORMAT, "an integer has no slices"},
        {"{{ l|select|last }}", STILL_E_FORMAT, "cannot be reversed"},
        {"{{ range(3)|tojson }}", STILL_E_FORMAT, "a range is no JSON"},
        {"{{ d.values()|tojson }}", STILL_E_FORMAT, "a view of a dict is no JSON"},
        {"{{ range(3) + [3] }}", STILL_E_FORMAT, "a range and a list"},
        {"{{ l|indent }}", STILL_E_FORMAT, "indent: a list"},
        {"{{ n|truncate(3) }}", STILL_E_FORMAT, "an integer has no length"},
        {"{{ ['a']|sum(start='') }}", STILL_E_FORMAT, "use join"},
        {"{{ d|urlencode }}", STILL_E_UNSUPPORTED, "takes text"},
        {"{% filter length %}a{% endfilter %}", STILL_E_FORMAT, "makes an integer"},
        {"{% set s = 'A b '*200000 %}{% for i in range(99999) %}{{ (s|wordcount, s is "
         "lower) "
         "and '' }}{% endfor %}",
         STILL_E_LIMIT, "more than"},
        {"\xFF", STILL_E_FORMAT, "no UTF-8"},
        {"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor "
         "%}",
         STILL_E_LIMIT, "more than"},
        {"{% for i in l %}{% for i in range(99999) %}{{ "
         "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
         "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}{% "
         "endfor %}",
         STILL_E_LIMIT, "MiB"},
        {"{{ 'a' * 10 ** 9 }}", STILL_E_LIMIT, "MiB"},
        {"{{ '%.999999999f' % 1.5 }}", STILL_E_LIMIT, "digits"},
        {"{% set s = ' ' * 10 ** 6 %}{% for i in range(99999) %}{% set x = s.strip() "
         "%}{% endfor %}",
         STILL_E_LIMIT, "steps"},
        {"{% for i in range(99999) %}{% set x = 'a' * 10 ** 6 %}{% endfor %}",
         STILL_E_LIMIT, "more than"},
        {"{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro "
         "%}{{ f(60) }}",
         STILL_E_LIMIT, "steps"},
        {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", STILL_E_LIMIT, "deep"},
        {"{{ 2 ** 63 }}", STILL_E_LIMIT, "64 bits"},
        {"{{ 1e22|int }}", STILL_E_LIMIT, "64 bits"},
        {"{{ (-0.25) ** 0.5 }}", STILL_E_UNSUPPORTED, "complex"},
        {"{{ '\\N{BULLET}' }}", STILL_E_UNSUPPORTED, "names a character"},
        {"{{ '\\u12' }}", STILL_E_FORMAT, "lacks its 4 digits"},
        {"{{ l in d }}", STILL_E_FORMAT, "a list cannot be a key"},
        {"{{ d.get((1, l)) }}", STILL_E_FORMAT, "a list cannot be a key"},
        {"{{ [d]|unique|list }}", STILL_E_FORMAT, "a dict cannot be a key"},
        {"{{ a.startswith(('x', z)) }}", STILL_E_FORMAT, "none where a string"},
        {"{{ '{:>5}'.format(z) }}", STILL_E_FORMAT, "none takes no format"},
        {"{% set s = namespace(x=[]) %}{% for i in range(1000) %}{% set s.x = [s.x] "
         "%}{% "
         "endfor %}{{ s.x }}",
         STILL_E_LIMIT, "deep"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        still_rendering r;
        still_error err;
        assert_int_equal(run(bad[i].text, &r, &err), bad[i].status);
        if (!strstr(err.text, bad[i].says)) fail_msg("%s: %s", bad[i].text, err.text);
        assert_null(r.text);
    }
}

RUN_TESTS(cmocka_unit_test(test_like_jinja2), cmocka_unit_test(test_marks),
          cmocka_unit_test(test_errors))
