/* sched_yield that sleeps, loaded before MPI into the tests' ranks (see pool.py).
 *
 * Open MPI waits in a loop of polls and yields. With more ranks than cores, and several tests at a
 * time, a yield mostly switches to another rank that polls, too: waiting took 40 % of the CPU time
 * of all tests. A sleep leaves the core to those that work; a message then waits 0.1 ms at most. */
#include <time.h>

int sched_yield(void)
{
    const struct timespec nap = {0, 50000}; /* the kernel's timer slack adds as much again */
    nanosleep(&nap, 0);
    return 0;
}
