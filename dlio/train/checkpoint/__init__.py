"""Checkpoints of a run: written in parallel while it goes on, whole or not there."""

from dlio.train.checkpoint.folder import Checkpoints, StoredCheckpoint

__all__ = ["Checkpoints", "StoredCheckpoint"]
