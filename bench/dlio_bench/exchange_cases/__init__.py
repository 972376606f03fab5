"""`dlio bench exchange`: traffic, cost and benefit of each exchange of gradients or weights.

| module | holds |
|---|---|
| `command` | the command, and the table of its cases |
| `messages`, `overlap`, `step`, `training`, `slow_rank` | one case each |
| `counted`, `timed`, `overlapped`, `stepped`, `slowed` | the programs of these ranks |
| `fitting`, `drawing` | fit of the model `dlio.plan.exchange_cost` to messages, and its picture |
| `monitor` | traffic that the MPI library has really sent |
| `variants`, `networks` | an exchange put around a training step; the networks |
"""
