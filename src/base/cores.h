/* cores.h - the cores of this machine that are ours to use. */
#ifndef STI_BASE_CORES_H
#define STI_BASE_CORES_H

/* Processors this process may run on: threads beyond that only wait for each other. */
int sti_processors(void);

/* Cores among them, and no more than the container's share of processor time: two
 * processors of one core have one arithmetic unit, and our loops keep that busy. */
int sti_cores(void);

#endif
