"""Start of the ranks of a job: on this machine, on the nodes of an allocation, or by ssh.

Commands (`dlio.cli`) say what to run; this package starts it, relays its output, ends it, and
starts it again. It imports no command.

| module | contents |
|---|---|
| `command_ranks` | `-n` of any command: its records go to ranks that call its function |
| `rank_environment` | the variables and limits that all launchers give to their ranks |
| `mpi_launch` | ranks on this machine under mpirun |
| `torch_launch` | ranks on this machine without MPI, and the store by which they meet |
| `rank_output` | output of ranks and launchers, and the filter of mpirun's errors |
| `rank_log` | a copy of each rank's output in a file of its own |
| `slurm_follow` | the output of a submitted job, until it ends |
| `rank_failures` | reasons of the ends of ranks, of which the cause is printed last |
| `relaunch` | jobs that start again |
| `agent_links`, `node` | the agents of nodes: the launcher's side, and what runs on a node |
| `node_requests` | nodes that join a running job and leave it |
| `job_folder` | the temporary folder by which a launcher, its ranks and other commands meet |
| `spread` | ranks on the nodes of an allocation, by mpirun, srun or a remote shell |
| `node_ranks` | the process that a remote shell starts on a node |
| `slurm_tasks` | a task of srun that becomes a rank |
| `slurm_script` | `dlio launch --slurm`: options, and the job script |
"""
