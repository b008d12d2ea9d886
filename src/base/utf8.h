/* utf8.h - what tokenizers ask about UTF-8, and text that terminals can bear. */
#ifndef STI_BASE_UTF8_H
#define STI_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Length of the well-formed character at p, or 0. With 0, *bad is the number of bytes
 * that belong to the broken character (at least 1), and *cut tells that the text ends
 * where it might still have become a character. */
size_t sti_utf8_char(const char *p, size_t n, size_t *bad, bool *cut);

/* Bytes of the longest well-formed text at p. */
size_t sti_utf8_span(const char *p, size_t n);

/* Code point of the well-formed character at p, *len its length. */
uint32_t sti_utf8_decode(const char *p, size_t *len);
/* Writes code point c; its length, up to 4. */
size_t sti_utf8_encode(uint32_t c, char *out);

/* Makes text from a file fit for a terminal, in place: control characters (also those of
 * C1, U+0080 to U+009F) and bytes that are no UTF-8 become '?', so that no escape
 * sequence is left. `lines` keeps newlines and tabs. */
void sti_utf8_harmless(char *p, size_t n, bool lines);

#define STI_UTF8_REPLACEMENT "\xEF\xBF\xBD" /* U+FFFD */

#endif
