/* quant.c - see quant.h.
 *
 * A suffix is compared with whole names, then with the labels, then with the ends of
 * names, so that Q4_K_M means X-Q4_K_M.gguf also beside X-UD-Q4_K_M.gguf, and
 * X-UD-Q4_K_M.gguf where it is the only one. Every name can be said in full, so there is a
 * suffix for every model whose name no other folder has. Listings may be long: nothing here compares all names with all others. */
#include "cli/fetch/quant.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char SEPARATORS[] = "-._/";
enum { DIGITS = 5, MOST_CHOICES = 12 };

size_t cli_name_stem(const char *name)
{
    const char *slash = strrchr(name, '/'), *colon = strrchr(name, ':');
    const bool has = colon && colon[1] && colon > name && (!slash || colon > slash + 1);
    return has ? (size_t)(colon - name) : strlen(name);
}

/* Five digits at p, as a number; 0 if they are none. */
static unsigned number_at(const char *p)
{
    for (int i = 0; i < DIGITS; i++)
        if (!isdigit((unsigned char)p[i])) return 0;
    return (unsigned)strtoul((char[]){p[0], p[1], p[2], p[3], p[4], 0}, NULL, 10);
}

bool cli_part_of(const char *name, const char *ext, cli_part *out)
{
    const size_t n = strlen(name), end = strlen(ext), tail = 1 + DIGITS + 4 + DIGITS;
    if (n <= end || strcasecmp(name + n - end, ext) != 0) return false;
    *out = (cli_part){.stem = n - end, .index = 1, .parts = 1};
    if (out->stem <= tail) return true;
    const char *p = name + out->stem - tail; /* -00001-of-00003 */
    const unsigned index = number_at(p + 1), parts = number_at(p + 1 + DIGITS + 4);
    if (p[0] == '-' && !strncmp(p + 1 + DIGITS, "-of-", 4) && index && index <= parts)
        *out = (cli_part){.stem = out->stem - tail, .index = index, .parts = parts};
    return true;
}

static const char *base_of(const char *name)
{
    const char *slash = strrchr(name, '/');
    return slash ? slash + 1 : name;
}

bool cli_is_gguf(const char *name, cli_part *out)
{
    const char *base = base_of(name);
    return cli_part_of(name, ".gguf", out) && strncasecmp(base, "mmproj", 6) != 0 &&
           !strcasestr(base, "imatrix") && !strcasestr(base, ".still.gguf") &&
           strcmp(base, "adapter.gguf") != 0;
}

bool cli_gguf_same(const char *a, const char *b)
{
    cli_part p, q;
    return cli_is_gguf(a, &p) && cli_is_gguf(b, &q) && p.stem == q.stem &&
           p.parts == q.parts && !memcmp(a, b, p.stem);
}

/* Whether p[0..n) is the name of a type: Q4_K_M, IQ4_XS, TQ1_0, F16, BF16, MXFP4, also
 * with UD- before it. */
static bool is_type(const char *p, size_t n)
{
    if (n > 3 && !strncasecmp(p, "UD-", 3)) p += 3, n -= 3;
    if (n == 0 || n >= CLI_LABEL_MAX) return false;
    for (size_t i = 0; i < n; i++)
        if (!isalnum((unsigned char)p[i]) && p[i] != '_') return false;
    if (strchr("iItT", p[0]) && n > 1 && tolower((unsigned char)p[1]) == 'q') p++, n--;
    if (n > 1 && tolower((unsigned char)p[0]) == 'q')
        return isdigit((unsigned char)p[1]) != 0;
    return (n == 3 && (!strncasecmp(p, "F16", 3) || !strncasecmp(p, "F32", 3))) ||
           (n == 4 && !strncasecmp(p, "BF16", 4)) ||
           (n >= 5 && !strncasecmp(p, "MXFP4", 5));
}

/* The type at the end of p[0..n), which must begin the text or follow a separator. */
static const char *type_at_end(const char *p, size_t n, size_t *length)
{
    for (size_t i = 0; i < n; i++)
        if ((i == 0 || strchr(SEPARATORS, p[i - 1])) && is_type(p + i, n - i)) {
            *length = n - i;
            return p + i;
        }
    return NULL;
}

const char *cli_gguf_label(const char *name, char out[CLI_LABEL_MAX])
{
    cli_part part;
    size_t n = 0;
    out[0] = 0;
    if (!cli_part_of(name, ".gguf", &part)) return out;
    const char *base = base_of(name);
    const size_t folder = (size_t)(base - name);
    if (folder > part.stem) return out;
    const char *type = type_at_end(base, part.stem - folder, &n);
    if (!type && folder) type = type_at_end(name, folder - 1, &n);
    const bool found = type != NULL;
    if (!found) type = base, n = part.stem - folder;
    if (n >= CLI_LABEL_MAX) n = CLI_LABEL_MAX - 1;
    for (size_t i = 0; i < n; i++) /* types are written in capitals */
        out[i] = (char)(found ? toupper((unsigned char)type[i]) : type[i]);
    out[n] = 0;
    return out;
}

/* ---- Choosing ------------------------------------------------------------ */

typedef enum match { ANY, BY_NAME, BY_LABEL, BY_END } match;

static bool matches(const char *name, match how, const char *suffix)
{
    cli_part part;
    char label[CLI_LABEL_MAX];
    if (!cli_is_gguf(name, &part)) return false;
    if (how == ANY) return true;
    if (how == BY_LABEL) return !strcasecmp(cli_gguf_label(name, label), suffix);
    const size_t n = strlen(suffix), folder = (size_t)(base_of(name) - name);
    if (how == BY_NAME)
        return part.stem - folder == n && !strncasecmp(name + folder, suffix, n);
    if (n > part.stem || strncasecmp(name + part.stem - n, suffix, n) != 0)
        return false;
    const char before = n == part.stem ? '/' : name[part.stem - n - 1];
    /* In Q4_K_M, "K_M" is no name of its own. */
    return strchr(SEPARATORS, before) && (before != '_' || is_type(suffix, n));
}

static cli_pick pick(const void *list, size_t n, cli_name_fn name, match how,
                     const char *suffix, size_t *first)
{
    cli_pick found = CLI_PICK_UNKNOWN;
    for (size_t i = 0; i < n; i++) {
        if (!matches(name(list, i), how, suffix)) continue;
        if (found == CLI_PICK_UNKNOWN) {
            found = CLI_PICK_ONE;
            *first = i;
        } else if (!cli_gguf_same(name(list, i), name(list, *first))) {
            return CLI_PICK_MANY;
        }
    }
    return found;
}

cli_pick cli_gguf_pick(const void *list, size_t n, cli_name_fn name, const char *suffix,
                       size_t *first)
{
    const cli_pick any = pick(list, n, name, ANY, NULL, first);
    if (any == CLI_PICK_UNKNOWN) return CLI_PICK_NONE;
    if (any == CLI_PICK_ONE && !suffix) return any;
    const char *wanted = suffix ? suffix : "Q4_K_M";
    cli_pick found = CLI_PICK_UNKNOWN;
    for (match how = BY_NAME; how <= BY_END && found == CLI_PICK_UNKNOWN; how++)
        found = pick(list, n, name, how, wanted, first);
    return found == CLI_PICK_UNKNOWN && !suffix ? CLI_PICK_MANY : found;
}

void cli_gguf_suffix(const void *list, size_t n, cli_name_fn name, size_t i,
                     sti_buf *out)
{
    cli_part part;
    char label[CLI_LABEL_MAX];
    size_t first;
    if (!cli_is_gguf(name(list, i), &part)) return;
    cli_gguf_label(name(list, i), label);
    if (pick(list, n, name, BY_LABEL, label, &first) == CLI_PICK_ONE) {
        sti_buf_puts(out, label);
        return;
    }
    const char *base = base_of(name(list, i));
    sti_buf_put(out, base, part.stem - (size_t)(base - name(list, i)));
}

void cli_gguf_choices(const void *list, size_t n, cli_name_fn name, const char *repo,
                      size_t n_repo, sti_buf *out)
{
    size_t shown[MOST_CHOICES];
    size_t n_shown = 0;
    for (size_t i = 0; i < n; i++) {
        cli_part part;
        bool seen = !cli_is_gguf(name(list, i), &part);
        for (size_t k = 0; k < n_shown && !seen; k++)
            seen = cli_gguf_same(name(list, i), name(list, shown[k]));
        if (seen) continue;
        if (n_shown == MOST_CHOICES) {
            sti_buf_puts(out, ", ...");
            return;
        }
        sti_buf_printf(out, "%s%.*s:", n_shown ? ", " : "", (int)n_repo, repo);
        cli_gguf_suffix(list, n, name, i, out);
        shown[n_shown++] = i;
    }
}
