/* text.h - string functions of the protocols, with the semantics of Python's str, in
 * which the protocols were written. */
#ifndef STI_EVAL_TEXT_H
#define STI_EVAL_TEXT_H

#include "base/buf.h"

/* Assumes well-formed UTF-8, as JSON strings are; each other byte counts as one. */
int sti_text_code_points(const char *s);
/* Strips white space at both ends: advances *s, and *n becomes the rest's length. */
void sti_text_strip(const char **s, size_t *n);
/* Bytes of s[0..n) without white space at its end. */
size_t sti_text_strip_end(const char *s, size_t n);
/* Appends s, its first letter in upper case and all others in lower case: ASCII,
 * Latin-1 and the even-odd pairs of Latin Extended-A. */
void sti_text_capitalize(sti_buf *b, const char *s);
/* Appends a text of HellaSwag, cleaned: stripped; " [title]" becomes ". "; the shortest
 * [...] of a line are deleted; two spaces become one in a single pass. */
void sti_text_clean(sti_buf *b, const char *s);

#endif
