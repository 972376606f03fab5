"""Start of the ranks of a job: on this machine, on nodes by ssh, by mpirun, srun and job
scripts."""
