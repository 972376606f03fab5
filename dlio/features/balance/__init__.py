"""Shares of each global batch by the measured speed of the ranks (`--balance`)."""
