"""`dlio bench exchange`: traffic, cost and benefit of each exchange of gradients or weights.

| module | holds |
|---|---|
| `exchange_command`, `exchange_options` | the command, the table of its cases, and its options |
| `message_cost`, `overlap_case`, `step_case`, `slow_rank_case` | one case each, and its ranks |
| `accuracy_case`, `placement_case` | the same; the ranks are those of `dlio train` |
| `balance_case` | the cases balance and unequal |
| `monitor` | traffic that the MPI library has really sent |
| `variants` | an exchange put around a training step; the networks |
| `paced_network` | networks that sleep as long as an accelerator would compute |
"""
