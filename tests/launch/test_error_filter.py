"""The filter of the ranks' standard error: errors are shown once, banners are left out."""

import os
import stat
from pathlib import Path

import pytest

from dlio.launch import mpi_launch
from dlio.launch.rank_output import ErrorFilter

RULE = "-" * 74 + "\n"
BANNER = [RULE, "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n", RULE]


def _sort(lines: list[str]) -> list[str]:
    sorter = ErrorFilter()
    return [shown for line in lines for shown in sorter.feed(line)] + sorter.end()


def test_an_error_that_all_ranks_report_is_shown_once_without_banners() -> None:
    error = "dlio: error: x.jpg cannot be decoded\n"
    assert _sort([error, *BANNER, "\0" + error, *BANNER, "\0"]) == [error]
    assert _sort([*BANNER, error]) == [error]


def test_an_error_in_the_middle_of_a_banner_is_shown() -> None:
    error = "dlio: error: x.jpg cannot be decoded\n"
    assert _sort([*BANNER[:2], error, BANNER[2]]) == [error]


def test_an_error_on_one_line_with_a_banner_is_separated_from_it() -> None:
    error = "dlio: error: x.jpg cannot be decoded\n"
    assert _sort([error, error[:-1] + RULE, *BANNER[1:]]) == [error]
    assert _sort([RULE[:-1] + error, *BANNER[1:]]) == [error]
    assert _sort([*BANNER[:2], error[:-1] + RULE]) == [error]


def test_banners_are_shown_when_no_rank_reports_an_error() -> None:
    assert _sort(["Killed\n", *BANNER]) == ["Killed\n", *BANNER]


@pytest.mark.parametrize(("kind", "limit"), [("PIPES", "-n"), ("FILES", "-n"), ("CHILDREN", "-u")])
def test_a_limit_that_mpirun_has_reached_is_named(kind: str, limit: str) -> None:
    line = f"[vm:1] PMIX ERROR: PMIX_ERR_SYS_LIMITS_{kind} in file iof_base_setup.c at line 125\n"
    (last,) = _sort([line])
    assert last.startswith("dlio: error: mpirun has reached the limit")
    assert f"ulimit {limit}" in last


def test_other_blocks_between_rules_are_passed_on() -> None:
    block = [RULE, "There are not enough slots available\n", RULE]
    assert _sort([*block, "dlio: error: a\n"]) == [*block, "dlio: error: a\n"]
    assert _sort(block[:2]) == block[:2]


@pytest.mark.parametrize(("failures", "code"), [(4, 0), (5, 213)])
def test_mpirun_that_could_not_start_any_rank_is_started_again(
    failures: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && {{ echo "mpirun (Open MPI) 5.0.8"; exit; }}
echo start >> {tmp_path}/starts
[ $(wc -l < {tmp_path}/starts) -gt {failures} ] && {{ echo trained; exit 0; }}
cat >&2 <<END
{RULE}The PMIx server's listener thread failed to start. We cannot
{RULE}END
exit 213
"""
    )
    mpirun.chmod(mpirun.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(mpi_launch, "find_mpirun", lambda: os.fspath(mpirun))
    assert mpi_launch.launch(["train"], 2).returncode == code
    shown = capfd.readouterr()
    assert len((tmp_path / "starts").read_text().split()) == 5
    assert shown.out == ("" if code else "trained\n")
    assert ("failed to start" in shown.err) == bool(code)


@pytest.mark.parametrize("crashes", [True, False])
def test_a_crash_of_open_mpi_after_a_loss_is_told_with_its_remedy(
    crashes: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    mpirun = tmp_path / "mpirun"
    frame = "libmpi.so.40(ompi_comm_revoke_local+0x3f)" if crashes else "libc.so.6(abort+0x1)"
    mpirun.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "mpirun (Open MPI) 5.0.8"; exit; }}\n'
        f'echo "[a:1] [ 1] /x/{frame}[0x7f]" >&2\n'
    )
    mpirun.chmod(mpirun.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(mpi_launch, "find_mpirun", lambda: os.fspath(mpirun))
    assert mpi_launch.launch(["train"], 2, min_ranks=1).returncode == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("dlio: error: all ranks were lost before the end")
    assert ("Open MPI 5.0 crashes" in said and "--resume" in said) == crashes
