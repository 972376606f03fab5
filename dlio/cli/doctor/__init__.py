"""`dlio doctor`: checks of a machine, or of all nodes of a job, before a training fails on them.

| module | contents |
|---|---|
| `findings` | a finding: a fact, how good it is, and the remedy |
| `software`, `probe` | Python, torch, launchers, and MPI as a process of its own sees it |
| `rank_checks` | ranks, cores and GPUs of each rank, differences between the nodes' clocks |
| `limit_checks` | descriptors, processes, memory, shared memory |
| `path_checks` | tiers and the source: file systems, free space, speed, stripes |
| `examination`, `doctor_command` | all of them over all ranks, and their tables |

A check looks and measures; it changes nothing, and leaves nothing behind.
"""
