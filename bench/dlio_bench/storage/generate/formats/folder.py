"""The writer of class folders: PPM images of random pixels."""

from dlio_bench.storage.generate.formats.part import Part


def write_folder(path: str, part: Part) -> None:
    """Write a file, which is one sample."""
    (data,) = part.payloads()
    with open(path, "xb") as file:
        file.write(data.data)
