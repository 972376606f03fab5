"""`dlio bench chaos`: training jobs that are hurt, and the price of surviving it.

| module | holds |
|---|---|
| `chaos_command`, `chaos_options` | the command and its options |
| `scheduled_faults` | faults, and when they are made |
| `storm` | the case storm: jobs, and faults that are made in them |
| `run_records`, `chaos_figures` | what is kept of the jobs; the figures of a storm |
| `replays` | a job's trace again, without faults, and the comparison of weights |
| `schedules_case`, `simulated_jobs` | losses on thousands of ranks, without processes |
| `chaos_job`, `leftovers` | one job, seen and hurt from outside; all that jobs leave behind |
| `stamp_writer` | the bench's callback in each rank, and the models of the case overhead |
| `stamps` | the files that the callback writes |
| `torchft_job`, `torchft_program` | a job of torchft: its command, and its training |
| `torchft_accounts` | arithmetic of the files that it writes |
| `accounts` | arithmetic: exactly once, effective training time, quantiles, confidence |
| `overhead_case` | the case overhead: step times of jobs without faults |
"""
