/* fuzz_prefix_ids.c - the files that say of which tokens a stored past is: any bytes give
 * tokens that the file has room for, or none. */
#include <stdlib.h>
#include <string.h>

#include "server/prefix_ids.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    enum { MOST = 64 };
    uint64_t model = 0;
    srv_prefix_ids got;
    if (n >= 16) memcpy(&model, data + 8, 8); /* of whoever wrote it */
    if (!srv_prefix_ids_parse(data, n, model, MOST, &got)) {
        if (got.id) abort();
        return 0;
    }
    if (got.n < 1 || got.n > MOST || n != srv_prefix_ids_bytes(got.n)) abort();
    if (memcmp(got.id, data + 32, (size_t)got.n * 4) != 0) abort();
    free(got.id);
    return 0;
}
