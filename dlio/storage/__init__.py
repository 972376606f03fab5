"""Blocks, shards, tiers and the hierarchy that reads a sample from the fastest of them."""
