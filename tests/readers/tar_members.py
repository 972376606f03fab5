"""Tars of given members, for the tests of readers."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path


def write_tar_of(path: Path, members: Mapping[str, bytes]) -> None:
    """Write a tar of members, by their names."""
    with tarfile.open(path, "w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
