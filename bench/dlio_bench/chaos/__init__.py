"""`dlio bench chaos`: training jobs that are hurt, and the price of surviving it.

| module | holds |
|---|---|
| `command`, `options` | the command and its options |
| `schedule` | faults, and when they are made |
| `storm` | the case storm: jobs, and faults that are made in them |
| `records`, `figures` | what is kept of the jobs; the figures of a storm |
| `replays` | a job's trace again, without faults, and the comparison of weights |
| `schedules`, `simulated` | the case schedules: losses on thousands of ranks, without processes |
| `job`, `leftovers` | one job, seen and hurt from outside; all that jobs leave behind |
| `inside` | the bench's callback in each rank, and the models of the case overhead |
| `stamps` | the files that the callback writes |
| `torchft_job`, `torchft_program` | a job of torchft: its command, and its training |
| `torchft_accounts` | arithmetic of the files that it writes |
| `accounts` | arithmetic: exactly once, effective training time, quantiles, confidence |
| `overhead` | the case overhead: step times of jobs without faults |
"""
