/* not_finite.c - finds results that are not finite, and the layer they come from.
 *
 * The residual stream only adds up: once a row of it holds a NaN or an infinity it
 * stays, and the final norm makes every logit of that row NaN. So one number of a row
 * that has logits tells, at no cost, whether all layers gave finite results. The layer
 * that did not is found only when needed: the tokens of the failed pass are fed to a
 * separate session, and each layer's output is checked. */
#include <math.h>

#include "session/session.h"

/* *layer: cfg.layers if every layer gives finite results for these tokens alone. */
static still_status find_layer(const still_session *s, const int32_t *tok, int n,
                               int *layer, still_error *err)
{
    still_session *own;
    STI_TRY(sti_session_like(s, n, &own, err));
    const sti_sequence seq = {.n = n, .memory = own->layer, .session = own->number};
    const still_status st =
        sti_model_find_nan_layer(s->model, &own->cfg, tok, &seq, layer, err);
    still_session_free(own);
    return st;
}

still_status sti_session_check(const still_session *s, const int32_t *tok, int n,
                               float result, still_error *err)
{
    if (isfinite(result)) return STILL_OK;
    const int layers = s->model->cfg.layers, rows = n < s->cfg.batch ? n : s->cfg.batch;
    int layer = layers;
    still_error why;
    STI_TRY(find_layer(s, tok + (n - rows), rows, &layer, err ? err : &why));
    if (layer == layers)
        return sti_fail(err, STILL_E_NUMERIC,
                        "a logit is %g, though the layers give numbers for the last %d "
                        "tokens alone: the final norm, the output matrix or the past "
                        "holds one that is not finite",
                        result, rows);
    return sti_fail(err, STILL_E_NUMERIC,
                    "what layer %d of 0-%d computes is not a number: its weights hold "
                    "one that is not finite, or its input is too large",
                    layer, layers - 1);
}
