"""Processes that stay on a node while ranks come and go: a job survives the loss of a whole node.

    launcher --ssh--> agent, one per node: holds RAM tiers and snapshots, starts and ends the zygote
                        |
                      zygote: has imported numpy, torch and dlio.train, never MPI; forks ranks
                        ^
    mpirun --> daemon --> shim: hands environment and streams to the zygote, and ends as its rank

| module | idea |
|---|---|
| `node_agent` | one process per node; it and all that it has started end with the launcher |
| `zygote` | a process that forks ranks out of what it has imported |
| `zygote_process` | the same for those that own it: agents, and the searcher of `dlio search` |
| `shim` | the stand-in of a rank under mpirun |
| `snapshot_slots` | the state of a training in shared memory, whole or not at all |
| `lock_keeper` | locks of a rank that its agent holds until the job is over |
| `job_starts` | which ranks run where in each start, and whether another makes sense (pure) |
| `agent_protocol` | names of files and sockets that these share |

Nothing here knows of training: the zygote imports modules by name.
"""
