/* sched_yield that sleeps, loaded before MPI into the tests' ranks (see pool.py).
 *
 * Open MPI waits in a loop of polls and yields, and where nothing else runs a yield returns at once: a
 * rank that waited 3 s for another used 2.1 s of CPU time, with naps 0.2 s. A message then waits
 * 0.1 ms at most. */
#include <time.h>

int sched_yield(void)
{
    const struct timespec nap = {0, 50000}; /* the kernel's timer slack adds as much again */
    nanosleep(&nap, 0);
    return 0;
}
