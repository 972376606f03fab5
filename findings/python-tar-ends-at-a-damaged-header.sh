#!/bin/sh
# Python 3.11's tarfile and WebDataset 1.0.2: a tar ends, without an error, at a header of which one
# bit is wrong, and at a cut between two members.
#
# tarfile raises for a bad header only where it is the first one; later ones count as the end of the
# archive. WebDataset reads by tarfile, so the rest of the shard is not trained on, and with
# `with_epoch` or a resampled stream no count shows it. GNU tar says "Skipping to next header", goes on
# and exits with 2. A file that is cut off between two members ends without a word for GNU tar, too.
# Way out: keep the number of samples, or a checksum, of each shard.
#
# Output seen:
#   whole: tarfile 1000, WebDataset 500, tar exits with 0
#   one bit of the 6th header: tarfile 5, WebDataset 3, tar exits with 2
#   cut off behind the 5th member: tarfile 5, WebDataset 3, tar exits with 0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.13.0 webdataset==1.0.2
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import io
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import webdataset

assert version("webdataset") == "1.0.2", version("webdataset")
with tarfile.open("whole.tar", "w") as made:
    for k in range(500):
        for suffix in ("txt", "cls"):
            member = tarfile.TarInfo(f"{k:03}.{suffix}")
            member.size = 3
            made.addfile(member, io.BytesIO(b"%03d" % k))
whole = bytearray(Path("whole.tar").read_bytes())
sixth = 5 * 1024  # Each member is a header and a block.
Path("cut.tar").write_bytes(whole[:sixth])
whole[sixth + 1] ^= 1
Path("bit.tar").write_bytes(whole)


def counts(path):
    samples = webdataset.WebDataset(path, shardshuffle=False)
    tar = subprocess.run(["tar", "-tf", path], capture_output=True, check=False)
    return len(tarfile.open(path).getnames()), sum(1 for _ in samples), tar.returncode


names = {
    "whole.tar": "whole",
    "bit.tar": "one bit of the 6th header",
    "cut.tar": "cut off behind the 5th member",
}
seen = {path: counts(path) for path in names}
for path, (members, samples, code) in seen.items():
    print(f"{names[path]}: tarfile {members}, WebDataset {samples}, tar exits with {code}")
assert seen == {"whole.tar": (1000, 500, 0), "bit.tar": (5, 3, 2), "cut.tar": (5, 3, 0)}, seen
PYTHON
