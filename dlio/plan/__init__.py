"""Pure computations: order, blocks, placement, schedule. No files, threads or MPI.

| module | contents |
|---|---|
| `order` | the order of an epoch: a keyed bijection between positions and samples |
| `layout`, `block_order` | a data set cut into blocks; an order that reads block by block |
| `listed_order`, `sample_mask` | the order of a sampler; the order of some samples |
| `tail_order` | an order that ends with requeued samples |
| `mixture`, `fair_counts` | a mixture of sources: samples, and their counts by weights |
| `mixture_end` | the end of its epoch |
| `placement` | the home node of each block, and the tier that keeps it |
| `schedule` | who consumes and sends which sample at each step |
| `rank_shares` | the samples of each rank in a step, also of ranks that differ in speed |
| `epoch` | an epoch's plan as one rank computes it: all of the above, by mode |
| `home_plan`, `survivor_plan` | the inexact modes, and the rest of their epochs after a loss |
| `sum_grid` | the hops of a sum: which rank adds which parts |
| `exchange_cost` | messages, bytes and seconds of an exchange of gradients |
"""
