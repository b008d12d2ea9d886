/* The fingerprint tells models apart: it changes with either end of any tensor, with
 * names, types and shapes, and, where asked for, with the adapter. */
#include <stdlib.h>
#include <string.h>

#include "../run.h"

#include "model/model.h"

typedef struct print {
    unsigned char b[STI_FINGERPRINT];
} print;

static print print_of(const still_model *m, bool with_adapter)
{
    print p;
    sti_model_fingerprint(m, with_adapter, p.b);
    return p;
}

static bool same(print a, print b)
{
    return memcmp(a.b, b.b, sizeof a.b) == 0;
}

/* Tensor i of the model in writable memory, the rest as they are. */
typedef struct other {
    still_model m;
    sti_tensor *t;
    unsigned char *bytes;
} other;

static other with_tensor(const still_model *m, size_t i)
{
    other o = {.m = *m};
    const size_t n = m->store.n_tensors;
    o.m.store.tensor = malloc(n * sizeof *o.m.store.tensor);
    o.bytes = malloc(m->store.tensor[i].bytes);
    assert_true(o.m.store.tensor && o.bytes);
    memcpy(o.m.store.tensor, m->store.tensor, n * sizeof *o.m.store.tensor);
    memcpy(o.bytes, m->store.tensor[i].data, m->store.tensor[i].bytes);
    o.t = &o.m.store.tensor[i];
    o.t->data = o.bytes;
    return o;
}

static void drop(other *o)
{
    free(o->m.store.tensor);
    free(o->bytes);
}

/* One byte at either end of any tensor, large or small. */
static void ends_of_every_tensor(void **state)
{
    const still_model *m = *state;
    const print was = print_of(m, false);
    int large = 0, small = 0;
    for (size_t i = 0; i < m->store.n_tensors; i++) {
        const size_t bytes = m->store.tensor[i].bytes;
        const size_t at[] = {0, 4095, bytes - 4096, bytes - 1};
        *(bytes > 3 * 4096 ? &large : &small) += 1;
        for (int k = 0; k < 4; k++) {
            if (at[k] >= bytes) continue; /* of a small tensor */
            other o = with_tensor(m, i);
            assert_true(same(print_of(&o.m, false), was));
            o.bytes[at[k]] ^= 1;
            if (same(print_of(&o.m, false), was))
                fail_msg("byte %zu of %zu of '%s' does not show", at[k], bytes,
                         m->store.tensor[i].name);
            drop(&o);
        }
    }
    assert_true(large > 0 && small > 0);
}

static void names_types_and_shapes(void **state)
{
    const still_model *m = *state;
    const print was = print_of(m, false);
    size_t i = 0;
    while (m->store.tensor[i].n_dims < 2) i++;
    other o = with_tensor(m, i);
    char *name = o.t->name, another[] = "another";
    o.t->name = another;
    assert_false(same(print_of(&o.m, false), was));
    o.t->name = name;
    o.t->type = o.t->type == STI_F16 ? STI_BF16 : STI_F16;
    assert_false(same(print_of(&o.m, false), was));
    o.t->type = m->store.tensor[i].type;
    o.t->dim[0] *= 2;
    o.t->dim[1] /= 2;
    assert_false(same(print_of(&o.m, false), was));
    drop(&o);
}

static void adapters(void **state)
{
    still_model *m = *state;
    still_error e;
    sti_adapter *a;
    sti_adapter_spec spec = {.lora = {2, 8, 31}, .base_name = "the base"};
    must(still_method_init(&spec.method, "still", 8, &e), &e);
    const sti_adapter_home home = sti_model_home(m);
    must(sti_adapter_new(&home, &spec, &a, &e), &e);
    const print base = print_of(m, true);
    m->adapter = a;
    const print with = print_of(m, true);
    assert_true(same(base, print_of(m, false)));
    assert_false(same(base, with));
    a->value[a->n_values - 1] += 1;
    assert_false(same(print_of(m, true), with));
    m->adapter = NULL;
    sti_adapter_free(a);
}

static int open_model(void **state)
{
    still_error e;
    must(still_model_open(FIXTURES "/train/model", NULL, (still_model **)state, &e),
         &e);
    return 0;
}

static int close_model(void **state)
{
    still_model_free(*state);
    return 0;
}

RUN_TESTS_IN(open_model, close_model, cmocka_unit_test(ends_of_every_tensor),
             cmocka_unit_test(names_types_and_shapes), cmocka_unit_test(adapters))
