/* A suffix and the names of a repository, a line each: every model that the list offers
 * is found by the suffix it is offered with, and belongs to one model only. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "cli/fetch/quant.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { MOST = 64 };

typedef struct names {
    char *line[MOST];
    size_t n;
} names;

static void check(bool holds)
{
    if (!holds) abort();
}

static const char *name_of(const void *list, size_t i)
{
    return ((const names *)list)->line[i];
}

static void check_name(const names *all, size_t i)
{
    cli_part part;
    char label[CLI_LABEL_MAX];
    const char *name = all->line[i];
    check(cli_name_stem(name) <= strlen(name));
    check(strlen(cli_gguf_label(name, label)) < CLI_LABEL_MAX);
    if (!cli_is_gguf(name, &part)) return;
    check(part.stem < strlen(name) && part.index >= 1 && part.index <= part.parts);
    check(cli_gguf_same(name, name));
    sti_buf suffix = {0};
    cli_gguf_suffix(all, all->n, name_of, i, &suffix);
    check(!suffix.failed);
    size_t first;
    const cli_pick found =
        cli_gguf_pick(all, all->n, name_of, suffix.n ? suffix.p : "", &first);
    /* Two files of one name in two folders cannot be told apart by a suffix. */
    check(found == CLI_PICK_MANY || !suffix.n ||
          (found == CLI_PICK_ONE && cli_gguf_same(all->line[first], name)));
    sti_buf_free(&suffix);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    names all = {0};
    char *text = sti_strndup((const char *)data, n), *rest = text;
    size_t first = 0;
    if (!text) return 0;
    const char *suffix = strsep(&rest, "\n");
    while (rest && all.n < MOST) all.line[all.n++] = strsep(&rest, "\n");
    for (size_t i = 0; i < all.n; i++) check_name(&all, i);
    const cli_pick given = cli_gguf_pick(&all, all.n, name_of, suffix, &first);
    check(given != CLI_PICK_ONE || first < all.n);
    const cli_pick none = cli_gguf_pick(&all, all.n, name_of, NULL, &first);
    check(none != CLI_PICK_UNKNOWN &&
          (none == CLI_PICK_NONE) == (given == CLI_PICK_NONE));
    sti_buf choices = {0};
    cli_gguf_choices(&all, all.n, name_of, "org/name", 8, &choices);
    check(!choices.failed && (choices.n > 0) == (given != CLI_PICK_NONE));
    sti_buf_free(&choices);
    free(text);
    return 0;
}
