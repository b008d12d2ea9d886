/* meta.c - numbers out of GGUF metadata.
 *
 * Writers disagree on integer widths (u32 here, i32 or u64 there), so readers ask for
 * "an integer" or "a number". Values lie unaligned in the mapping. NULL entries are
 * fine and give false, so a look-up and a read can be one expression. */
#include <string.h>

#include "file/store.h"

/* Element i of m as both kinds of number; false for strings and past the end. */
static bool number(const sti_meta *m, sti_meta_type type, uint64_t i, int64_t *integer,
                   double *real, bool *is_integer)
{
    if (i >= m->count || !m->data) return false;
    *is_integer = type != STI_META_F32 && type != STI_META_F64;
#define READ(id, ctype)                                                                \
    case id: {                                                                         \
        ctype v;                                                                       \
        memcpy(&v, (const unsigned char *)m->data + i * sizeof v, sizeof v);           \
        if (*is_integer) *integer = (int64_t)v;                                        \
        *real = (double)v;                                                             \
        return true;                                                                   \
    }
    switch (type) {
        READ(STI_META_U8, uint8_t)
        READ(STI_META_I8, int8_t)
        READ(STI_META_U16, uint16_t)
        READ(STI_META_I16, int16_t)
        READ(STI_META_U32, uint32_t)
        READ(STI_META_I32, int32_t)
        READ(STI_META_F32, float)
        READ(STI_META_I64, int64_t)
        READ(STI_META_F64, double)
    case STI_META_BOOL: {
        unsigned char v = ((const unsigned char *)m->data)[i];
        *integer = v != 0;
        *real = v != 0;
        return true;
    }
    case STI_META_U64: {
        uint64_t v;
        memcpy(&v, (const unsigned char *)m->data + i * sizeof v, sizeof v);
        *is_integer = v <= INT64_MAX; /* larger ones can still be read as floats */
        *integer = *is_integer ? (int64_t)v : 0;
        *real = (double)v;
        return true;
    }
    case STI_META_STRING:
    case STI_META_ARRAY: return false;
    }
#undef READ
    return false;
}

static bool read_int(const sti_meta *m, sti_meta_type type, uint64_t i, int64_t *out)
{
    int64_t integer = 0;
    double real;
    bool is_integer;
    if (!number(m, type, i, &integer, &real, &is_integer) || !is_integer) return false;
    *out = integer;
    return true;
}

static bool read_float(const sti_meta *m, sti_meta_type type, uint64_t i, double *out)
{
    int64_t integer;
    double real;
    bool is_integer;
    if (!number(m, type, i, &integer, &real, &is_integer)) return false;
    *out = real;
    return true;
}

bool sti_meta_int(const sti_meta *m, int64_t *out)
{
    return m && read_int(m, m->type, 0, out);
}

bool sti_meta_float(const sti_meta *m, double *out)
{
    return m && read_float(m, m->type, 0, out);
}

bool sti_meta_elem_int(const sti_meta *m, uint64_t i, int64_t *out)
{
    return m && m->type == STI_META_ARRAY && read_int(m, m->elem, i, out);
}

bool sti_meta_elem_float(const sti_meta *m, uint64_t i, double *out)
{
    return m && m->type == STI_META_ARRAY && read_float(m, m->elem, i, out);
}
