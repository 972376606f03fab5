"""`dlio bench chaos`: training jobs that are hurt, and the price of surviving it.

| module | holds |
|---|---|
| `chaos_command`, `chaos_options` | the command and its options |
| `scheduled_faults` | faults, and when they are made |
| `chaos_job`, `leftovers` | one job, seen and hurt from outside; all that jobs leave behind |
| `storm`, `chaos_figures` | the case storm: jobs in which faults are made; their figures |
| `node_storm`, `pretended_nodes` | the case nodes; nodes of this machine, and how to lose them |
| `overhead_case` | the case overhead: step times of jobs without faults |
| `suspicions` | the case suspicions: a job that nobody hurts, on a busy machine |
| `schedules_case`, `simulated_jobs` | losses on thousands of ranks, without processes |
| `stamps` | the bench's callback in each rank, and the files that it writes |
| `torchft_job`, `torchft_program` | a job of torchft and its arithmetic; its training |
| `accounts` | arithmetic: exactly once, effective training time, quantiles, confidence |
"""
