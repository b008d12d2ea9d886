/* prefix_ids.c - see prefix_ids.h.
 *
 *   "STILLID1"  u64 model  u64 bytes of the past  u32 has logits  u32 n
 *   ids [n]  u32 CRC-32 of all before it */
#include "server/prefix_ids.h"

#include <string.h>
#include <zlib.h>

#include "base/mem.h"
#include "base/new_file.h"

static const char MAGIC[8] = "STILLID1";

typedef struct ids_head {
    char magic[8];
    uint64_t model, past_bytes;
    uint32_t has_logits, n;
} ids_head;
_Static_assert(sizeof(ids_head) == 32, "the file header has no holes");

size_t srv_prefix_ids_bytes(int n)
{
    return sizeof(ids_head) + (size_t)n * sizeof(int32_t) + sizeof(uint32_t);
}

bool srv_prefix_ids_parse(const unsigned char *p, size_t size, uint64_t model, int most,
                          srv_prefix_ids *out)
{
    ids_head head;
    uint32_t crc;
    *out = (srv_prefix_ids){0};
    if (size < sizeof head + sizeof crc) return false;
    memcpy(&head, p, sizeof head);
    memcpy(&crc, p + size - sizeof crc, sizeof crc);
    if (memcmp(head.magic, MAGIC, sizeof MAGIC) != 0 || head.model != model)
        return false;
    if (most < 1 || head.n < 1 || head.n > (uint32_t)most ||
        size != srv_prefix_ids_bytes((int)head.n) || head.past_bytes > SIZE_MAX / 4)
        return false;
    if ((uint32_t)crc32_z(crc32(0, NULL, 0), p, size - sizeof crc) != crc) return false;
    int32_t *id = sti_alloc(head.n, sizeof *id);
    if (!id) return false;
    memcpy(id, p + sizeof head, (size_t)head.n * sizeof *id);
    *out = (srv_prefix_ids){.id = id,
                            .n = (int)head.n,
                            .has_logits = head.has_logits != 0,
                            .past_bytes = head.past_bytes};
    return true;
}

still_status srv_prefix_ids_write(const srv_prefix_ids *ids, uint64_t model,
                                  const char *path, still_error *err)
{
    ids_head head = {.model = model,
                     .past_bytes = ids->past_bytes,
                     .has_logits = ids->has_logits,
                     .n = (uint32_t)ids->n};
    const size_t bytes = (size_t)ids->n * sizeof *ids->id;
    sti_new_file *f;
    memcpy(head.magic, MAGIC, sizeof MAGIC);
    uLong crc = crc32_z(crc32(0, NULL, 0), (const unsigned char *)&head, sizeof head);
    const uint32_t sum = (uint32_t)crc32_z(crc, (const unsigned char *)ids->id, bytes);
    STI_TRY(sti_new_file_open(path, &f, err));
    still_status st = sti_new_file_put(f, &head, sizeof head, err);
    if (st == STILL_OK) st = sti_new_file_put(f, ids->id, bytes, err);
    if (st == STILL_OK) st = sti_new_file_put(f, &sum, sizeof sum, err);
    if (st == STILL_OK) return sti_new_file_finish(f, err);
    sti_new_file_abort(f);
    return st;
}
