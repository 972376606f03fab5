"""Training scripts drawn from a grammar, run in one process and on ranks, and compared."""
