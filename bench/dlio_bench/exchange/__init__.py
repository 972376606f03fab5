"""`dlio bench exchange`: what each exchange of gradients or weights sends, costs and is worth.

| module | holds |
|---|---|
| `command` | the command, and the table of its cases |
| `messages`, `overlap`, `step`, `training`, `slow_rank` | one case each |
| `counted`, `timed`, `overlapped`, `stepped`, `slowed` | the programs of these ranks |
| `fitting`, `drawing` | fit of the model `dlio.forecast.exchange` to messages, and its picture |
| `monitor` | what the MPI library has really sent |
| `variants`, `networks` | an exchange put around a training step; what is trained |
"""
