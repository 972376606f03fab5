"""File systems by their names: outputs of their commands, as their manuals show them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dlio.cli.doctor.path_checks import check_place
from dlio.storage import file_system_kind
from dlio.storage.file_system_kind import (
    Stripes,
    file_system_of,
    parse_beegfs,
    parse_lustre,
    parse_nfs,
)
from dlio.util.mount_points import parse_mounts

MIB = 1 << 20
BEEGFS_7 = """Entry type: file
EntryID: 0-5D285750-1
Metadata node: node1.beeg.local [ID: 1]
Stripe pattern details:
+ Type: RAID0
+ Chunksize: 512k
+ Number of storage targets: desired: 4; actual: 2
+ Storage targets:
  + 1 @ node1.beeg.local [ID: 1]
  + 2 @ node2.beeg.local [ID: 2]
"""
BEEGFS_8 = """Entry type: directory
EntryID: root
ParentID:
Stripe pattern details:
+ Type: RAID0
+ Chunksize: 1M
+ Number of storage targets: desired: 4
+ Storage Pool: 1  (default)
Inlined inode: no
"""
LUSTRE = "stripe_count:  8 stripe_size:   4194304\n"
NFS = "rw,relatime,vers=4.2,rsize=1048576,wsize=1048576,namlen=255,hard,nconnect=8,sec=sys"


@pytest.mark.parametrize(
    ("parse", "text", "wanted"),
    [
        (parse_beegfs, BEEGFS_7, Stripes(2, MIB // 2)),
        (parse_beegfs, BEEGFS_8, Stripes(4, MIB)),
        (parse_beegfs, "", Stripes()),
        (parse_beegfs, "Unable to connect to management node\n", Stripes()),
        (parse_lustre, LUSTRE, Stripes(8, 4 * MIB)),
        (parse_lustre, "4\n1048576\n", Stripes(4, MIB)),
        (parse_lustre, "-1\n1048576\n", Stripes(1, MIB)),
        (parse_lustre, "", Stripes()),
        (parse_nfs, NFS, Stripes(8, MIB)),
        (parse_nfs, "rw,relatime", Stripes()),
    ],
)
def test_outputs_are_parsed(parse: Callable[[str], Stripes], text: str, wanted: Stripes) -> None:
    assert parse(text) == wanted


@pytest.mark.parametrize(
    ("kind", "source", "command", "output", "said", "requests"),
    [
        ("lustre", "10.0.0.1@o2ib:/work", "lfs", LUSTRE, "8 stripes of 4 MiB", 32),
        ("beegfs", "beegfs_nodev", "beegfs-ctl", BEEGFS_7, "2 storage targets", 32),
        ("beegfs", "beegfs_nodev", "beegfs", BEEGFS_8, "4 storage targets, chunks of 1 MiB", 32),
        ("nfs4", "server:/export", "", "", "8 connections, requests of 1 MiB", 32),
        ("gpfs", "gpfs0", "", "", "all disks, blocks of", 64),
    ],
)
def test_places_follow_their_file_system(
    kind: str,
    source: str,
    command: str,
    output: str,
    said: str,
    requests: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of requests follows the servers, and the doctor says what there is."""
    programs = tmp_path / "bin"
    programs.mkdir()
    if command:
        program = programs / command
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}END\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    row = f"30 1 0:40 / {tmp_path} {NFS.split(',vers')[0]} - {kind} {source} {NFS}\n"
    monkeypatch.setattr(file_system_kind, "read_mounts", lambda: parse_mounts(row))
    place = file_system_of(str(tmp_path))
    assert said in place.stripes
    assert place.network
    assert place.requests(objects=False) == requests
    (finding,) = check_place("data", place, 1 << 20)
    assert said in finding.text


def test_a_command_that_hangs_or_fails_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "lfs"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(file_system_kind, "_TIMEOUT_S", 0.2)
    for body in ("exec sleep 60", "echo lost connection >&2; exit 5"):
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        assert file_system_kind.find_stripes("lustre", str(tmp_path), "") == Stripes()


def test_beeond_is_known_by_its_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "beeond"
    folder.mkdir()
    row = f"30 1 0:40 / {folder} rw - beegfs beegfs_ondemand rw\n"
    monkeypatch.setattr(file_system_kind, "read_mounts", lambda: parse_mounts(row))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert file_system_of(str(folder)).filesystem == "beeond"


def test_a_large_file_on_one_server_has_a_remedy() -> None:
    for kind, word in (("lustre", "lfs migrate"), ("beegfs", "--numtargets=4")):
        one = file_system_kind.FileSystemKind("/data", kind, kind, "/data", 1, MIB)
        (finding,) = check_place("/data", one, 8 << 30)
        assert finding.remedy is not None
        assert word in finding.remedy
