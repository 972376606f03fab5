"""The writer of WebDataset tars, with members such as `000042.bin` and `000042.cls`."""

import io
import tarfile

from dlio_bench.storage_cases.generate.format_writers.part import FilePart


def write_tar(path: str, part: FilePart) -> None:
    """Write a tar whose members are named by the numbers of their samples."""
    with tarfile.open(path, "x") as archive:
        for row, data in enumerate(part.payloads()):
            key = f"{part.first + row:09d}"
            for extension, body in (("image", data.tobytes()), ("cls", b"%d" % part.label)):
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))
