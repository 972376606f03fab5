"""The writer of class folders: PPM images of random pixels."""

from dlio_bench.storage_cases.generate.format_writers.part import FilePart


def write_folder(path: str, part: FilePart) -> None:
    """Write a file, which is one sample."""
    (data,) = part.payloads()
    with open(path, "xb") as file:
        file.write(data.data)
