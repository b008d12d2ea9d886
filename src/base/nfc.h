/* nfc.h - Unicode's normalization form C: characters composed, marks in order. */
#ifndef STI_BASE_NFC_H
#define STI_BASE_NFC_H

#include "base/buf.h"

/* Bytes at the start of a well-formed text that NFC leaves as they are: all n for nearly
 * every text, and found at about a byte per cycle while it is ASCII. */
size_t sti_nfc_span(const char *p, size_t n);

/* Appends a well-formed text in NFC. Lack of memory shows in out->failed. */
void sti_nfc_put(const char *p, size_t n, sti_buf *out);

#endif
