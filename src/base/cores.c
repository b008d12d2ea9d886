/* cores.c - see cores.h. Where the kernel does not tell, each processor is a core. */
#include "base/cores.h"

#include <sched.h>
#include <stdio.h>
#include <unistd.h>

int sti_processors(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    const long n =
        sysconf(_SC_NPROCESSORS_ONLN); /* more than a cpu_set_t has room for */
    return n > 0 ? (int)n : 1;
}

/* The first processor of the core of processor `cpu`; `cpu` itself if unknown. */
static int first_of_core(int cpu)
{
    char path[96];
    snprintf(path, sizeof path,
             "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    FILE *f = fopen(path, "re");
    int first = cpu;
    if (!f) return cpu;
    const int n = fscanf(f, "%d", &first); /* NOLINT(cert-err34-c) */
    fclose(f);
    if (n != 1 || first < 0 || first >= CPU_SETSIZE) first = cpu;
    return first;
}

/* Whole processors' worth of time that the container gets; `most` if it has no limit. */
static int quota(int most)
{
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re");
    long long time = 0, period = 0;
    if (!f) return most;
    /* or "max 100000" */
    const int n = fscanf(f, "%lld %lld", &time, &period); /* NOLINT(cert-err34-c) */
    fclose(f);
    if (n != 2 || time <= 0 || period <= 0) return most;
    const long long whole = time / period;
    return whole < 1 ? 1 : whole < most ? (int)whole : most;
}

int sti_cores(void)
{
    cpu_set_t ours, seen;
    if (sched_getaffinity(0, sizeof ours, &ours) != 0) return quota(sti_processors());
    CPU_ZERO(&seen);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &ours)) CPU_SET(first_of_core(cpu), &seen);
    return quota(CPU_COUNT(&seen));
}
