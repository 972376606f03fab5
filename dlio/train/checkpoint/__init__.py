"""Checkpoints of a run: written in parallel during training, published only when complete.

Nothing is imported here: `checkpoint_store` needs torch.distributed.checkpoint, which takes a
quarter as long to import as everything else that trains, and runs without checkpoints do without.
"""
