/* templates.c - golden data of chat templates: templates/NAME, cases.json with named
 * conversations (the variables of a template), and expected.jsonl with what Jinja2 made of
 * each template and conversation, or the error that it raised. A template is a case. */
#include <stdio.h>
#include <string.h>

#include "eval/selftest/selftest.h"
#include "file/store.h"
#include "template/template.h"

typedef struct suite {
    const sti_suite_run *run;
    json_t *cases;
    char name[128]; /* the template of the lines that are being counted */
    int lines, wrong;
} suite;

static still_status open_file(const suite *s, const char *folder, const char *name,
                              sti_map *out, still_error *err)
{
    char path[4096];
    if (snprintf(path, sizeof path, "%s/%s%s", s->run->dir, folder, name) >=
        (int)sizeof path)
        return sti_fail(err, STILL_E_ARG, "%s: the path is too long", s->run->dir);
    return sti_map_open(path, out, err);
}

/* Renders a template as the golden data were made: <s>, </s>, on 2026-07-26 at 09:05. */
static still_status render(const suite *s, const char *name, const json_t *variables,
                           still_rendering *out, still_error *err)
{
    static const struct tm now = {.tm_year = 126,
                                  .tm_mon = 6,
                                  .tm_mday = 26,
                                  .tm_hour = 9,
                                  .tm_min = 5,
                                  .tm_yday = 206};
    const sti_template_input in = {variables, "<s>", "</s>", &now};
    sti_template *t = NULL;
    sti_map m;
    STI_TRY(open_file(s, "templates/", name, &m, err));
    still_status st = sti_template_parse((const char *)m.data, m.size, &t, err);
    sti_map_close(&m);
    if (st == STILL_OK) st = sti_template_render(t, &in, out, err);
    sti_template_free(t);
    return st;
}

static void report(suite *s)
{
    still_check check = {"conversations rendered differently", s->wrong, 0, false};
    if (s->lines) sti_selftest_report(s->run, s->name, &check, 1);
    s->lines = s->wrong = 0;
}

static still_status check_line(suite *s, const json_t *o, int number, still_error *err)
{
    const char *name = json_string_value(json_object_get(o, "template")),
               *which = json_string_value(json_object_get(o, "case"));
    const json_t *want = json_object_get(o, "rendered"),
                 *variables = which ? json_object_get(s->cases, which) : NULL;
    if (!name || strchr(name, '/') || strlen(name) >= sizeof s->name || !variables ||
        (!want && !json_object_get(o, "error")))
        return sti_fail(err, STILL_E_FORMAT,
                        "expected.jsonl:%d: lacks a template, a case of cases.json, or "
                        "what came out",
                        number);
    if (strcmp(name, s->name) != 0) report(s);
    snprintf(s->name, sizeof s->name, "%s", name);
    still_rendering r = {0};
    still_error failure = {0};
    const still_status st = render(s, name, variables, &r, &failure);
    if (st == STILL_E_MEMORY || st == STILL_E_IO) {
        if (err) *err = failure;
        return st;
    }
    const bool same = want ? st == STILL_OK && r.n == json_string_length(want) &&
                                 !memcmp(r.text, json_string_value(want), r.n)
                           : st != STILL_OK;
    still_rendering_free(&r);
    s->wrong += !same;
    s->lines++;
    return STILL_OK;
}

static still_status check_lines(suite *s, sti_lines *l, still_error *err)
{
    for (int number = 1;; number++) {
        json_t *o;
        STI_TRY(sti_selftest_line("expected", l, number, &o, err));
        if (!o) break;
        const still_status st = check_line(s, o, number, err);
        json_decref(o);
        STI_TRY(st);
    }
    report(s);
    return STILL_OK;
}

still_status sti_selftest_templates(const sti_suite_run *r, still_error *err)
{
    suite s = {.run = r};
    char path[4096];
    sti_map m;
    sti_lines *l = NULL;
    if (snprintf(path, sizeof path, "%s/expected.jsonl", r->dir) >= (int)sizeof path)
        return sti_fail(err, STILL_E_ARG, "%s: the path is too long", r->dir);
    STI_TRY(open_file(&s, "", "cases.json", &m, err));
    still_status st = sti_json_read("cases.json", (const char *)m.data, m.size,
                                    STI_JSON_OBJECT, &s.cases, err);
    sti_map_close(&m);
    if (st == STILL_OK) st = sti_lines_open(path, &l, err);
    if (st == STILL_OK) {
        st = check_lines(&s, l, err);
        sti_lines_close(l);
    }
    json_decref(s.cases);
    return st;
}
