"""`dlio bench exchange`: traffic, cost and benefit of each exchange of gradients or weights.

| module | holds |
|---|---|
| `exchange_command` | the command, and the table of its cases |
| `message_cost`, `overlap_case`, `step_case`, `accuracy_case`, `slow_rank_case` | one case each |
| `message_count_rank`, `timing_rank`, `overlap_rank` | the programs of these ranks |
| `step_rank`, `slow_rank_program` | the same |
| `monitor` | traffic that the MPI library has really sent |
| `variants` | an exchange put around a training step; the networks |
"""
