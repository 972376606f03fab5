"""Models that torch compiles (`--compile`)."""
