/* page.h - the files of the page at /, which are part of the program.
 *
 * They lie in server/page as they are sent; cmake/embed.cmake makes a table of them. */
#ifndef SERVER_PAGE_H
#define SERVER_PAGE_H

#include <stddef.h>

typedef struct srv_page_file {
    const char *path; /* "/app.js" */
    const char *type; /* of its content */
    const char *tag;  /* changes with the content; in quotes, for ETag */
    const unsigned char *p;
    size_t n;
} srv_page_file;

/* NULL: the page has no such file. */
const srv_page_file *srv_page_find(const char *path);

/* Headers that all its files are sent with: name, value, ..., NULL. Nothing but its own
 * files can be loaded or run, and nobody can frame it. */
extern const char *const srv_page_headers[];

/* The table that cmake/embed.cmake writes. */
extern const srv_page_file srv_page_files[];
extern const size_t srv_page_count;

#endif
