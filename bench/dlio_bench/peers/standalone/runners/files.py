"""Files and archives that several runners read or write."""

import io
import tarfile
from collections.abc import Iterable, Sequence


def read(path: str) -> bytes:
    """Bytes of a file."""
    with open(path, "rb") as file:
        return file.read()


def write_tar(path: str, members: Iterable[Sequence[tuple[str, bytes]]]) -> None:
    """Write an archive of samples, each made of named parts."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for parts in members:
            for name, content in parts:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
