/* convert.h - published files into the files that eval and linearize read: JSON lines (and
 * word lists) whose fields docs/evaluation.md gives.
 *
 * A converter is a row of a table: what it writes, and a function over the published files,
 * which lie in a folder under the names of the list. All of a set's files appear together
 * at the end, or none does. What is read is not trusted: archives are bounded, every record
 * is checked, and an error says file and line. */
#ifndef CLI_DATA_CONVERT_H
#define CLI_DATA_CONVERT_H

#include "base/buf.h"
#include "base/json.h"
#include "base/new_file.h"

enum { CLI_MAKES = 4 }; /* most files of a set */

typedef struct cli_make {
    const char *folder;      /* of the published files */
    const char *const *file; /* [n] their names */
    size_t n;
    struct {
        const char *name;
        sti_new_file *file;
        uint64_t records, bytes;
    } out[CLI_MAKES];
} cli_make;

typedef struct cli_converter {
    const char *name;
    const char *makes[CLI_MAKES]; /* ends with NULL where there are fewer */
    size_t files;                 /* that it reads; 0: any number of one kind */
    still_status (*run)(cli_make *m, still_error *err);
} cli_converter;

/* Rows by the file that has them; each ends with a name that is NULL. */
extern const cli_converter cli_convert_choice[]; /* questions with choices */
extern const cli_converter
    cli_convert_question[];                    /* questions about texts, and tasks */
extern const cli_converter cli_convert_text[]; /* texts and words */

const cli_converter *cli_converter_find(const char *name); /* NULL: none */

/* Converts file[0..n) of `folder` into files of `to`. m tells afterwards what was made. */
still_status cli_convert(const cli_converter *c, const char *folder,
                         const char *const *file, size_t n, const char *to, cli_make *m,
                         still_error *err);

/* ---- For converters ------------------------------------------------------ */

/* Published file i as a whole. */
still_status cli_make_read(const cli_make *m, size_t i, sti_buf *out, still_error *err);
/* The entry of published file i, a zip archive, whose name ends in `tail`; from FILE.TAIL
 * if that is there, because no more of the archive was fetched. */
still_status cli_make_unzip(const cli_make *m, size_t i, const char *tail, sti_buf *out,
                            still_error *err);
/* Where published file i is; free() it, NULL: no memory. */
char *cli_make_path(const cli_make *m, size_t i);

/* Appends a record, or text, to the k-th file that is made. Takes v; NULL: no memory. */
still_status cli_make_put(cli_make *m, int k, json_t *v, still_error *err);
still_status cli_make_put_text(cli_make *m, int k, const char *p, size_t n,
                               still_error *err);
/* "index" of the next record. */
json_int_t cli_make_index(const cli_make *m, int k);

/* Lines of a text: UTF-8 without zero bytes, and without the line end, \n or \r\n. */
typedef struct cli_lines {
    const char *what, *unit; /* in errors: "FILE:", "" or "record " */
    const char *p, *end;
    const char *line;
    size_t n, number; /* from 1 */
} cli_lines;
void cli_lines_open(cli_lines *l, const char *what, const sti_buf *text);
bool cli_lines_next(cli_lines *l);
still_status cli_lines_bad(const cli_lines *l, const char *why, still_error *err);
/* The line as a JSON object; *out NULL: it is blank. json_decref it. */
still_status cli_lines_json(const cli_lines *l, json_t **out, still_error *err);

/* Calls fn with each object of the JSON array that `text` is; l tells where it is. */
typedef still_status (*cli_element_fn)(cli_make *m, const cli_lines *l, const json_t *v,
                                       still_error *err);
still_status cli_make_elements(cli_make *m, const char *what, const sti_buf *text,
                               cli_element_fn fn, still_error *err);

/* Fields of a record. The error, put behind file and line, names the field. */
still_status cli_field_text(const cli_lines *l, const json_t *v, const char *key,
                            const char **out, still_error *err);
still_status cli_field_texts(const cli_lines *l, const json_t *v, const char *key,
                             json_t **out, still_error *err); /* borrowed */

#endif
