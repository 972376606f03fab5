"""Pure computations: order, blocks, placement, schedule. No files, threads or MPI."""
