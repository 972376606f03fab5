"""Programs that load pictures with one library each, run by the Python of its own environment.

`python -m runners MODULE FUNCTION` serves `protocol`. Nothing here imports dlio: the package needs
the standard library, NumPy, and the library that it measures.
"""
