"""Samples that teach nothing are skipped."""
