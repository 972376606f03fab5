"""Surviving lost ranks: who is left, how they agree on it, and how they continue together."""
