/* text.h - what protocols ask of text, as Python's str has it: they were written there.
 */
#ifndef STI_EVAL_TEXT_H
#define STI_EVAL_TEXT_H

#include "base/buf.h"

/* Well-formed UTF-8 is assumed (JSON strings are); of other bytes each counts as one.
 */
int sti_text_code_points(const char *s);
/* Without white space at both ends: *s moves, the rest has *n bytes. */
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
