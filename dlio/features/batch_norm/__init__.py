"""Batch normalisation over the ranks (`--batch-norm sync`), and exact batches (`ghost`)."""
