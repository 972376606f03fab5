"""Data sets of a workload's shape, made from a seed.

content    sizes and bytes of each sample: pure
names      the names of a workload's files
formats/   a writer for each format
stamp      which workload a folder holds, and whether it is complete
writing    `generate`: files written in parallel, by several ranks if there are
"""

from dlio_bench.storage_cases.generate.data_writer import generate
from dlio_bench.storage_cases.generate.generated_data import GeneratedData

__all__ = ["GeneratedData", "generate"]
