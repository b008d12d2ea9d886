/* named.h - initializers of tables of functions that are named after their entries: a
 * prefix, which may be empty, and the entry's name.
 *
 *   STI_NAMED_2(sti_cpu_, rope, swiglu)   .rope = sti_cpu_rope, .swiglu = sti_cpu_swiglu
 */
#ifndef STI_BASE_NAMED_H
#define STI_BASE_NAMED_H

#define STI_NAMED_1(prefix, a) .a = prefix##a
#define STI_NAMED_2(prefix, a, b) STI_NAMED_1(prefix, a), STI_NAMED_1(prefix, b)
#define STI_NAMED_3(prefix, a, b, c) STI_NAMED_2(prefix, a, b), STI_NAMED_1(prefix, c)
#define STI_NAMED_4(prefix, a, b, c, d)                                                \
    STI_NAMED_2(prefix, a, b), STI_NAMED_2(prefix, c, d)
#define STI_NAMED_5(prefix, a, b, c, d, e)                                             \
    STI_NAMED_3(prefix, a, b, c), STI_NAMED_2(prefix, d, e)

#endif
