/* comm_load.c - finds libstill-mpi.so and loads it; see comm_mpi.h.
 *
 * The module is searched for relative to the file that this code was loaded from
 * (the command or libstill.so), by absolute path: never in the current directory,
 * and never through the search path of the dynamic linker. A program linked with
 * libstill.a may be anywhere; for it STILL_MPI_MODULE names the file. */
#include <dlfcn.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train/comm_mpi.h"

#ifndef STI_MODULES_FROM_BIN /* set by CMake: the way from bin to lib */
#define STI_MODULES_FROM_BIN "../lib/still"
#endif

/* The path of the file that holds this code, from the system's list of mappings, which
 * has it as an absolute path for programs and libraries alike. */
static bool find_own_path(char path[static PATH_MAX])
{
    const uintptr_t here = (uintptr_t)&find_own_path;
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) return false;
    char line[PATH_MAX + 128];
    bool found = false;
    while (!found && fgets(line, sizeof line, maps)) {
        char *name = strchr(line, '/'), *dash;
        const uintmax_t begin = strtoumax(line, &dash, 16);
        if (!name || *dash != '-' || here < begin ||
            here >= strtoumax(dash + 1, NULL, 16))
            continue;
        name[strcspn(name, "\n")] = 0;
        found = strlen(name) < PATH_MAX;
        if (found) memcpy(path, name, strlen(name) + 1);
    }
    fclose(maps);
    return found;
}

static still_status find_module(char path[static PATH_MAX], still_error *err)
{
    static const char *const places[] = {
        "still",                  /* beside an installed libstill.so */
        STI_MODULES_FROM_BIN,     /* from an installed program */
        "modules", "../modules"}; /* in the build folder */
    char own[PATH_MAX];
    if (!find_own_path(own))
        return sti_fail(err, STILL_E_IO,
                        "/proc/self/maps does not say where still lies");
    const int folder = (int)(strrchr(own, '/') - own);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const int n =
            snprintf(path, PATH_MAX, "%.*s/%s/libstill-mpi.so", folder, own, places[i]);
        if (n > 0 && n < PATH_MAX && access(path, F_OK) == 0) return STILL_OK;
    }
    return sti_fail(
        err, STILL_E_UNSUPPORTED,
        "started as one of several processes, but the module for MPI, "
        "libstill-mpi.so, is neither in %.*s/still nor in %.*s/%s: build still "
        "with MPI's headers (on Debian and Ubuntu: libopenmpi-dev) and install "
        "it, or name the file in STILL_MPI_MODULE",
        folder, own, folder, own, STI_MODULES_FROM_BIN);
}

static still_status load(const char *path, const sti_mpi_module **out, still_error *err)
{
    /* RTLD_GLOBAL, because Open MPI loads plug-ins that expect libmpi's symbols. It
     * stays loaded: MPI is finalized when the process exits. */
    void *module = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!module)
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "cannot load the module for MPI: %s; install the MPI it was built "
            "with (on Debian and Ubuntu: openmpi-bin)",
            dlerror());
    void *symbol = dlsym(module, STI_MPI_ENTRY);
    sti_mpi_entry entry;
    memcpy(&entry, &symbol,
           sizeof entry); /* POSIX: an object pointer holds a function */
    if (!entry)
        return sti_fail(err, STILL_E_UNSUPPORTED, "%s is not a module of still", path);
    *out = entry();
    if (strcmp((*out)->version(), still_version()) != 0)
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "%s is of still %s, this is still %s: install both from one build", path,
            (*out)->version(), still_version());
    return STILL_OK;
}

still_status sti_mpi_load(const sti_mpi_module **out, still_error *err)
{
    char path[PATH_MAX];
    const char *named = secure_getenv("STILL_MPI_MODULE");
    *out = NULL;
    if (named && *named != '/')
        return sti_fail(err, STILL_E_ARG,
                        "STILL_MPI_MODULE is '%s', which is not an absolute path",
                        named);
    if (named) return load(named, out, err);
    STI_TRY(find_module(path, err));
    return load(path, out, err);
}
