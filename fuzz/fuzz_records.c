/* fuzz_records.c - records of training text: any bytes give documents whose prompt lies
 * inside them, records that say why they are broken, or one error. */
#include <string.h>

#include "memory_file.h"
#include "train/data/parts.h"

static void check(bool holds)
{
    if (!holds) abort();
}

static void check_record(const sti_record *rec)
{
    if (rec->broken) {
        check(!rec->text && rec->n == 0 && strlen(rec->broken) < 200);
        return;
    }
    check(rec->text && rec->prompt < rec->n && rec->text[rec->n] == 0);
    check(!rec->prompt || !memcmp(rec->text, "Below is an instruction", 23));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char path[32];
    sti_records *r;
    sti_record rec;
    still_error err = {0};
    int fd = memory_file(data, n, path);
    if (sti_records_open(path, &r, &err) == STILL_OK) {
        still_status status;
        bool more;
        while ((status = sti_records_next(r, &rec, &more, &err)) == STILL_OK && more) {
            check_record(&rec);
            check(sti_records_offset(r, n) <= n);
        }
        check(status == STILL_OK || err.text[0]);
        sti_records_close(r);
    } else {
        check(!r && err.text[0]);
    }
    close(fd);
    return 0;
}
