/* The page's files as they are in the program: all that they name is there, nothing is
 * inline, and nothing comes from elsewhere. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "../run.h"

#include "server/page.h"

static char *text_of(const srv_page_file *f)
{
    char *text = calloc(f->n + 1, 1);
    assert_non_null(text);
    memcpy(text, f->p, f->n);
    assert_int_equal(strlen(text), f->n);
    return text;
}

static bool is_type(const srv_page_file *f, const char *type)
{
    return strncmp(f->type, type, strlen(type)) == 0;
}

static void test_files_are_found(void **state)
{
    (void)state;
    assert_true(srv_page_count >= 3);
    for (size_t i = 0; i < srv_page_count; i++) {
        const srv_page_file *f = &srv_page_files[i];
        assert_ptr_equal(srv_page_find(f->path), f);
        assert_true(f->n > 0);
        assert_true(f->tag[0] == '"' && strlen(f->tag) == 18 && f->tag[17] == '"');
    }
    assert_string_equal(srv_page_find("/")->path, "/index.html");
    assert_true(is_type(srv_page_find("/"), "text/html"));
    assert_true(is_type(srv_page_find("/app.js"), "text/javascript"));
    assert_true(is_type(srv_page_find("/style.css"), "text/css"));
    assert_null(srv_page_find(""));
    assert_null(srv_page_find("/none.js"));
    assert_null(srv_page_find("/../app.js"));
}

/* Checks every quoted address that follows `mark`, and counts them. */
static int check_names(const char *text, const char *mark)
{
    int found = 0;
    for (const char *at = text; (at = strstr(at, mark)) != NULL;) {
        char name[64] = "";
        at += strlen(mark);
        if (*at == '#') continue; /* a place of the page itself */
        const size_t n = strcspn(at, "\"");
        const char *from = at[0] == '.' ? at + 1 : at; /* "./client.js" */
        assert_true(n < sizeof name);
        memcpy(name, from, n - (size_t)(from - at));
        if (!srv_page_find(name)) fail_msg("no file of the page is called '%s'", name);
        found++;
    }
    return found;
}

static void test_names_are_there(void **state)
{
    (void)state;
    char *html = text_of(srv_page_find("/")), *app = text_of(srv_page_find("/app.js"));
    assert_true(check_names(html, "src=\"") >= 2);
    assert_true(check_names(html, "href=\"") >= 2);
    assert_true(check_names(app, "from \"") >= 3);
    for (size_t i = 0; i < srv_page_count; i++) {
        char *text = text_of(&srv_page_files[i]);
        if (is_type(&srv_page_files[i], "text/javascript"))
            check_names(text, "from \"");
        free(text);
    }
    free(html);
    free(app);
}

/* What the policy would forbid, and what would make HTML of text. */
static void test_nothing_inline(void **state)
{
    (void)state;
    static const char *const never[] = {
        "innerHTML",      "outerHTML", "insertAdjacentHTML",
        "document.write", "eval(",     "new Function",
        "https://",       " style=\"", " onclick",
        "javascript:",    "<style",    "@import"};
    for (size_t i = 0; i < srv_page_count; i++) {
        char *text = text_of(&srv_page_files[i]);
        for (size_t k = 0; k < sizeof never / sizeof *never; k++)
            if (strstr(text, never[k]))
                fail_msg("%s has '%s'", srv_page_files[i].path, never[k]);
        for (const char *at = text; (at = strstr(at, "<script")) != NULL; at++)
            assert_non_null(strstr(at, "src=\"/app.js\"></script>"));
        free(text);
    }
}

static const char *header(const char *name)
{
    for (const char *const *h = srv_page_headers; h[0]; h += 2)
        if (strcmp(h[0], name) == 0) return h[1];
    fail_msg("no header %s", name);
    return NULL;
}

static void test_headers(void **state)
{
    (void)state;
    const char *policy = header("Content-Security-Policy");
    assert_non_null(strstr(policy, "default-src 'none'"));
    assert_non_null(strstr(policy, "script-src 'self'"));
    assert_non_null(strstr(policy, "frame-ancestors 'none'"));
    assert_null(strstr(policy, "unsafe"));
    assert_null(strstr(policy, "*"));
    assert_string_equal(header("X-Content-Type-Options"), "nosniff");
    assert_string_equal(header("Referrer-Policy"), "no-referrer");
}

RUN_TESTS(cmocka_unit_test(test_files_are_found),
          cmocka_unit_test(test_names_are_there), cmocka_unit_test(test_nothing_inline),
          cmocka_unit_test(test_headers))
