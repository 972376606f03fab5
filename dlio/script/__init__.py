"""`dlio run`: a script that was written for one process, on many ranks, unchanged.

What a script makes of torch's is taken over where it is made: optimizers get an exchange, loaders
give each rank its share of every batch, rank 0 alone prints and writes. See `dlio.script.runner`.
"""

__all__: list[str] = []
