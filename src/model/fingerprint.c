/* fingerprint.c - telling models apart without reading gigabytes.
 *
 * Two fine-tunes of one base share every name and shape and differ in every tensor, so
 * the first and last bytes of each tensor are enough to tell them apart. */
#include <openssl/evp.h>
#include <string.h>

#include "model/model.h"

enum { ENDS = 4096 };

still_status sti_model_fingerprint(const still_model *m, bool with_adapter,
                                   unsigned char out[STI_FINGERPRINT], still_error *err)
{
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    if (!ctx) return sti_fail_memory(err, m->store.path, 0);
    bool ok = EVP_DigestInit_ex(ctx, EVP_sha256(), NULL) == 1;
    for (size_t i = 0; i < m->store.n_tensors && ok; i++) {
        const sti_tensor *t = &m->store.tensor[i];
        size_t n = t->bytes < ENDS ? t->bytes : ENDS;
        int32_t type = (int32_t)t->type;
        ok = EVP_DigestUpdate(ctx, t->name, strlen(t->name) + 1) == 1 &&
             EVP_DigestUpdate(ctx, &type, sizeof type) == 1 &&
             EVP_DigestUpdate(ctx, t->dim, (size_t)t->n_dims * sizeof *t->dim) == 1 &&
             EVP_DigestUpdate(ctx, t->data, n) == 1 &&
             EVP_DigestUpdate(ctx, (const char *)t->data + t->bytes - n, n) == 1;
    }
    const sti_adapter *a = with_adapter ? m->adapter : NULL;
    if (a && ok)
        ok = EVP_DigestUpdate(ctx, a->value, a->n_values * sizeof *a->value) == 1;
    ok = ok && EVP_DigestFinal_ex(ctx, out, NULL) == 1;
    EVP_MD_CTX_free(ctx);
    if (!ok)
        return sti_fail(err, STILL_E_IO, "%s: SHA-256 is not to be had from OpenSSL",
                        m->store.path);
    return STILL_OK;
}
