"""Data sets of a workload's shape, made from a seed.

content          sizes and bytes of each sample: pure
format_writers   a writer for each format
stamp            which workload a folder holds, and whether it is complete
data_writer      `generate`: files written in parallel, by several ranks if there are
"""

from dlio_bench.storage_cases.generate.data_writer import GeneratedData, generate

__all__ = ["GeneratedData", "generate"]
