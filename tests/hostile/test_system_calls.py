"""dlio opens, renames and removes below the descriptors of folders that it has verified.

The system calls of commands are traced: none of those that change a file names it by a path of
several parts, and none of those that open one follows a link.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.cold,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]
_CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += (-?\d+)")
_CALLS = (
    *("open", "openat", "openat2", "creat", "rename", "renameat", "renameat2", "unlink", "rmdir"),
    *("unlinkat", "mkdir", "mkdirat", "link", "linkat", "symlink", "symlinkat", "truncate"),
)
_NAMED = re.compile(r'(?:(AT_FDCWD|\d+)(?:<([^>]*)>)?, )?"([^"]*)"')


def faults(trace: str, room: str) -> list[str]:
    """Return the calls that change files below a folder in another way than through descriptors.

    Args:
        trace: lines of strace, with `-f -y`.
        room: path of the folder.
    """
    wrong = []
    for line in trace.splitlines():
        call = _CALL.match(line)
        if call is None or int(call[3]) < 0:
            continue
        name, arguments = call[1], call[2]
        for base, at, path in _NAMED.findall(arguments):
            if not os.path.join(at or "/", path).startswith(room):
                continue
            opens = name.startswith("open")
            changes = not opens or "O_WRONLY" in arguments or "O_RDWR" in arguments
            by_path = base in ("", "AT_FDCWD") or "/" in path
            follows = opens and "O_NOFOLLOW" not in arguments and path != "."  # The folder.
            if changes and (by_path or follows):
                wrong.append(line)
    return wrong


def test_faults_are_found() -> None:
    for good in (
        '1 openat(3</r/a>, "b", O_WRONLY|O_CREAT|O_EXCL|O_NOFOLLOW, 0600) = 4</r/a/b>',
        '1 openat(3</r/a>, ".", O_RDWR|O_CLOEXEC|O_TMPFILE, 0600) = 4</r/a/#7 (deleted)>',
    ):
        assert not faults(good, "/r")
    for bad in (
        '1 openat(AT_FDCWD</>, "/r/a", O_WRONLY|O_CREAT|O_NOFOLLOW, 0600) = 4',
        '1 openat(3</r>, "a", O_WRONLY|O_CREAT, 0600) = 4</r/a>',
        '1 openat(3</r>, "a/b", O_WRONLY|O_NOFOLLOW) = 4</r/a/b>',
        '1 unlink("/r/a") = 0',
        '1 renameat(AT_FDCWD</>, "/r/a", 3</r>, "b") = 0',
    ):
        assert faults(bad, "/r") == [bad]


def _write_pictures(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for k in range(8):
            picture = Image.new("RGB", (40, 40), (30 * k, 100, 50))
            picture.save(folder / name / f"{k}.jpg")


@pytest.mark.parametrize("command", ["pack", "stage", "evict", "train"])
def test_commands_change_files_below_descriptors_alone(tmp_path: Path, command: str) -> None:
    data, room = tmp_path / "data", tmp_path / "room"
    _write_pictures(data)
    for each in ("tier", "out", "cache"):
        (room / each).mkdir(parents=True, mode=0o700)
    tiers = ["--tiers", f"disk:{room}/tier:1GiB"]
    stage = ["stage", str(data), *tiers, "--report", f"{room}/out/stage.json"]
    dlio = [sys.executable, "-P", "-m", "dlio.cli"]
    environment = {**os.environ, "DLIO_CACHE": f"{room}/cache", "PYTHONDONTWRITEBYTECODE": "1"}
    commands = {
        "pack": ["pack", str(data), f"{room}/out/packed"],
        "stage": stage,
        "evict": ["evict", "--all", *tiers],
        "train": [
            *("train", str(data), "--model", "resnet(width=4)", "--epochs", "1", *tiers),
            *("--batch-size", "4", "--image-size", "32"),
            *("--checkpoint", f"{room}/out/ck", "--report", f"{room}/out/r.json"),
        ],
    }
    if command == "evict":
        subprocess.run([*dlio, *stage], env=environment, check=True, timeout=300)
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "-y", "-qq", "-s", "4096", "-e", f"trace={','.join(_CALLS)}"]
    subprocess.run(
        [*strace, "-o", str(trace), *dlio, *commands[command]],
        env=environment,
        check=True,
        timeout=600,
    )
    text = trace.read_text(errors="replace")
    assert str(room) in text
    assert not faults(text, str(room))
