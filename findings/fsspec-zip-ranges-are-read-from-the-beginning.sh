#!/bin/sh
# fsspec 2026.9.0 on Python 3.11: a range of an uncompressed file in a zip costs all bytes before it.
#
# Archives of pictures and of HDF5 files are often written without compression, so that a range of a
# member could be a range of the archive. `cat_file(path, start, end)` opens the member anew and seeks
# in it, and until Python 3.11 zipfile seeks by reading: 64 ranges of 128 KiB, all of an 8 MiB member
# once, read 260 MiB, and as many from S3. One open file that only goes forward reads each byte once, as
# does a tar. Python 3.12 seeks in stored members, and the same lines read 8 MiB: of two environments
# with the same fsspec, one is 32 times slower.
#
# Output seen:
#   Python 3.11.7: 64 ranges, once over a stored member of 8 MiB: zip 260 MiB read, tar 8 MiB
#   the same through one open file of the zip: 8 MiB read
#   Python 3.12.1, 3.13.0: zip 8 MiB read
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check fsspec==2026.9.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import io
import os
import sys
import tarfile
import zipfile

import fsspec
from fsspec.implementations.tar import TarFileSystem
from fsspec.implementations.zip import ZipFileSystem

assert fsspec.__version__ == "2026.9.0", fsspec.__version__
os.chdir(sys.argv[1])
SIZE, STEP = 8 << 20, 128 << 10
data = os.urandom(SIZE)
with zipfile.ZipFile("a.zip", "w", zipfile.ZIP_STORED) as archive:
    archive.writestr("x", data)
with tarfile.open("a.tar", "w") as archive:
    member = tarfile.TarInfo("x")
    member.size = SIZE
    archive.addfile(member, io.BytesIO(data))


class Counting(io.FileIO):
    """Counts the bytes that are read."""

    count = 0

    def read(self, size=-1):
        found = super().read(size)
        self.count += len(found)
        return found


def ranges(read) -> bool:
    return all(read(at) == data[at : at + STEP] for at in range(0, SIZE, STEP))


mib = {}
for name, kind in (("zip", ZipFileSystem), ("tar", TarFileSystem)):
    file = Counting(f"a.{name}")
    system = kind(fo=file)
    file.count = 0
    assert ranges(lambda at: system.cat_file("x", at, at + STEP))
    mib[name] = round(file.count / (1 << 20))
file = Counting("a.zip")
system = ZipFileSystem(fo=file)
file.count = 0
with system.open("x") as member:
    assert ranges(lambda at: (member.seek(at), member.read(STEP))[1])
once = round(file.count / (1 << 20))
print(
    f"Python {sys.version.split()[0]}: 64 ranges, once over a stored member of 8 MiB: "
    f"zip {mib['zip']} MiB read, tar {mib['tar']} MiB"
)
print(f"the same through one open file of the zip: {once} MiB read")
assert mib["zip"] > 200 if sys.version_info < (3, 12) else mib["zip"] < 16
assert mib["tar"] < 16
assert once < 16
PYTHON
