"""Checkpoints of a run: written in parallel during training, published only when complete."""

from dlio.train.checkpoint.checkpoint_store import Checkpoints, StoredCheckpoint

__all__ = ["Checkpoints", "StoredCheckpoint"]
