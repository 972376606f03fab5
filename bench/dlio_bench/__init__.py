"""The benchmark suite: `dlio bench`."""
