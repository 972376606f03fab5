"""Set-up faults made on purpose: each is finding, with its remedy."""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from dlio.cli import main
from dlio.cli.doctor.examination import DoctorOptions, examine, merged
from dlio.cli.doctor.findings import Finding, worst
from dlio.cli.doctor.limit_checks import check_limits, check_shared_memory
from dlio.cli.doctor.path_checks import check_place, check_source, check_tier, measure_folder
from dlio.cli.doctor.probe import MpiFacts, probe_mpi
from dlio.cli.doctor.rank_checks import (
    RankHardware,
    allocation,
    check_clocks,
    check_ranks,
    clock_offsets,
    lost_ranks,
)
from dlio.cli.doctor.software import (
    check_launchers,
    check_mpi,
    check_torch,
    check_variables,
    is_same_library,
    slurm_plugins,
)
from dlio.comm.single import SingleCommunicator
from dlio.storage.file_system_kind import FileSystemKind
from dlio.storage.tier_spec import TierSpec, parse_tiers
from dlio.util.machine_memory import memory_limit
from dlio.util.shared_folders import user_folder

OPEN_MPI = MpiFacts("Open MPI v5.0.11", "multiple", survives=True, paths=["/a/libmpi.so.40"])
HYDRA = "HYDRA build details: Version: 4.1.2"


def bad(findings: Iterable[Finding]) -> list[Finding]:
    return [each for each in findings if each.state != "ok"]


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = bad(findings)
    assert finding.remedy
    return finding


def fact(
    rank: int,
    node: str = "a",
    cores: int = 4,
    of: int = 4,
    gpus: int = 0,
    visible: str = "",
    device: str = "cpu",
) -> RankHardware:
    return RankHardware(rank, node, tuple(range(cores)), of, gpus, visible, device)


def test_copies_that_do_not_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PROCID", "0"), ("STEP_ID", "0"), ("NTASKS", "4")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    done = subprocess.run(
        [sys.executable, "-m", "dlio.cli", "doctor", "--quick", "--tiers", "none"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 2
    said = " ".join(done.stdout.split())
    assert "srun started 4 processes (SLURM_NTASKS=4)" in said
    assert "srun --mpi=pmix, srun dlio launch, mpirun -n 4" in said


def test_a_mpirun_of_another_library() -> None:
    finding = only(check_mpi(OPEN_MPI, "/usr/bin/mpirun", HYDRA))
    assert (finding.subject, finding.state) == ("mpirun", "error")
    assert "first in PATH" in finding.remedy
    assert not bad(check_mpi(OPEN_MPI, "/usr/bin/mpirun", "mpirun (Open MPI) 5.0.11"))


@pytest.mark.parametrize(
    ("library", "mpirun", "same"),
    [
        ("Open MPI v4.1.4", "mpirun (Open MPI) 5.0.3", False),
        ("Open MPI v5.0.11", "mpirun (Open MPI) 5.0.3", True),
        (
            "Intel(R) MPI Library 2021.13",
            "Intel(R) MPI Library for Linux* OS, Version 2021.13",
            True,
        ),
        ("MPICH Version: 4.1.2", HYDRA, True),
        ("MPICH Version: 4.1.2", "mpirun (Open MPI) 5.0.3", False),
        ("HPE something of its own", HYDRA, True),
    ],
)
def test_libraries_are_told_apart(library: str, mpirun: str, same: bool) -> None:
    assert is_same_library(library, mpirun) == same


def test_two_mpi_libraries_in_one_process() -> None:
    facts = MpiFacts("Open MPI v5.0.11", "multiple", survives=True, paths=["/a.so", "/b.so"])
    finding = only(check_mpi(facts, "/bin/mpirun", ""))
    assert (finding.state, finding.subject) == ("error", "MPI libraries")
    assert "/a.so and /b.so" in finding.text


def test_an_mpi_that_cannot_be_loaded_or_lacks_something() -> None:
    assert "libmpi" in only(check_mpi(MpiFacts(problem="no libmpi.so"), None, "")).text
    old = MpiFacts("MPICH 3.3", "serialized", paths=["/a.so"])
    subjects = {each.subject for each in bad(check_mpi(old, None, ""))}
    assert subjects == {"MPI threads", "fault tolerance", "mpirun"}


def test_a_gpu_is_wanted_of_a_torch_without_one() -> None:
    pytest.importorskip("torch")
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "--device cpu" in only(check_torch("cuda")).remedy
    assert not bad(check_torch("auto"))


def test_the_decoder_of_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "a GPU")
    for is_there, words in ((True, "can decode"), (False, "pip install")):
        monkeypatch.setattr(
            "dlio.cli.doctor.software.is_installed", lambda is_there=is_there: is_there
        )
        named = {each.subject: each for each in check_torch("cuda")}
        assert words in str(named["nvImageCodec"])


def test_few_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        finding = only(check_limits(infiniband=False))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (finding.subject, finding.state) == ("open files", "error")
    assert f"ulimit -n {hard}" in finding.remedy


def test_no_space_in_shared_memory(tmp_path: Path) -> None:
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(tmp_path)], check=False
        ).returncode
    ):
        pytest.skip("only root may mount a tmpfs")
    try:
        finding = only(check_shared_memory(0, 1, str(tmp_path)))
        assert "--shm-size" in finding.remedy
        assert finding.state == "error"
        (tier,) = parse_tiers("ram:1TiB")
        large = only(check_shared_memory(tier.capacity, 1))
        assert (large.state, "lower ram:" in large.remedy) == ("warning", True)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert only(check_shared_memory(0, 1, str(tmp_path / "none"))).state == "error"


def test_tiers_that_cannot_be_used(tmp_path: Path) -> None:
    def check(root: Path, capacity: int = 1 << 20) -> list[Finding]:
        return list(check_tier(TierSpec("disk", str(root), capacity)))

    fine = tmp_path / "fine"
    fine.mkdir()
    (well,) = check(fine)
    assert well.state == "ok"
    assert "/s, reads" in well.text
    assert list(fine.iterdir()) == []
    open_to_all = tmp_path / "open"
    (open_to_all / user_folder()).mkdir(parents=True)
    (open_to_all / user_folder()).chmod(0o777)
    finding = only(check(open_to_all))
    assert "mode 777" in finding.text
    assert finding.remedy.startswith("remove it")
    assert "create the folder" in only(check(tmp_path / "missing")).remedy
    file = tmp_path / "file"
    file.touch()
    assert "is not a folder" in only(check(file)).text
    assert "free space" in only(check(fine, 1 << 60)).remedy
    assert list(fine.iterdir()) == []


def test_a_large_file_on_one_stripe() -> None:
    lustre = FileSystemKind("/lustre/data", "lustre", "lustre", "/lustre", 1, 1 << 20)
    finding = only(check_place("/lustre/data", lustre, 8 << 30))
    assert "lfs migrate" in finding.remedy
    assert not bad(check_place("/lustre/data", lustre, 1 << 20))
    striped = FileSystemKind("/lustre/data", "lustre", "lustre", "/lustre", 8, 1 << 20)
    assert not bad(check_place("/lustre/data", striped, 8 << 30))


def test_a_source_that_is_none(tmp_path: Path) -> None:
    assert only(check_source(str(tmp_path / "nothing"))).state == "error"


def test_a_source_is_described(pictures: Path) -> None:
    subjects = [each.subject.split()[0] for each in check_source(str(pictures))]
    assert subjects == [str(pictures), "file", "requests"]


def test_ranks_that_share_cores_and_gpus() -> None:
    bound = [fact(rank, cores=1, of=64) for rank in range(4)]
    assert "--bind-to none" in only(check_ranks(bound)).remedy
    many = [fact(rank, cores=2, of=2) for rank in range(8)]
    assert "fewer ranks" in only(check_ranks(many)).remedy
    same = [fact(rank, cores=32, of=32, gpus=2, device="cuda:0") for rank in range(2)]
    assert "share 0" in only(check_ranks(same)).text
    # By CUDA_VISIBLE_DEVICES, each has one of its own.
    own = [fact(k, "a", 32, 32, 2, visible=str(k), device="cuda:0") for k in range(2)]
    assert not bad(check_ranks(own))
    mixed = [fact(0, "a", 32, 32, 2, device="cuda:0"), fact(1, "a", 32, 32)]
    assert "no GPU, or computing on the CPU: rank 1" in only(check_ranks(mixed)).text
    uneven = [fact(0, cores=8, of=8), fact(1, cores=8, of=8), fact(2, "b")]
    assert "a 2, b 1" in only(check_ranks(uneven)).text


def test_clocks_that_differ() -> None:
    finding = check_clocks([0.0, 0.01, 7.0], 0.001, ["a", "b", "c"])
    assert (finding.state, "c differs most" in finding.text) == ("warning", True)
    assert check_clocks([0.0, 0.01], 0.001, ["a", "b"]).state == "ok"
    # What is less than the uncertainty proves nothing.
    assert check_clocks([0.0, 7.0], 6.9, ["a", "b"]).state == "ok"
    offsets, uncertain = clock_offsets(SingleCommunicator())
    assert offsets == [0.0]
    assert uncertain < 1


def test_misspelt_variables() -> None:
    finding = only(check_variables(["DLIO_TIRES", "HOME"]))
    assert finding.remedy == "write DLIO_TIERS"


def test_memory_of_control_groups(tmp_path: Path) -> None:
    own = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for line in own:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder, name = tmp_path / "memory", "memory.limit_in_bytes"
        elif not controllers:
            folder, name = tmp_path, "memory.max"
        else:
            continue
        inner = folder / path.strip("/")
        inner.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("max\n")
        (inner / name).write_text("1073741824\n")
    assert memory_limit(tmp_path) == 1 << 30
    assert memory_limit(tmp_path / "none") is None


def test_what_slurm_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    srun = tmp_path / "srun"
    srun.write_text(
        "#!/bin/sh\necho 'MPI plugin types are...'\necho '\tnone'\necho '\tcray_shasta'\n"
        "echo '\tpmix'\necho 'specific pmix plugin versions available: pmix_v4'\n"
    )
    srun.chmod(0o755)
    assert "pmix" in slurm_plugins(str(srun))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert not bad(check_launchers())
    srun.write_text("#!/bin/sh\necho 'MPI plugin types are...'\necho '\tnone'\n")
    assert "--mpi=pmix" in only(check_launchers()).remedy
    srun.write_text("#!/bin/sh\necho 'srun: MPI types are...' >&2\necho 'srun: pmi2, pmix' >&2\n")
    assert slurm_plugins(str(srun)) == ["pmi2", "pmix"]
    srun.write_text(
        "#!/bin/sh\necho 'srun: error: Unable to contact slurm controller (connect failure)' >&2\n"
    )
    assert slurm_plugins(str(srun)) == []
    assert "lists nothing: srun: error: Unable to contact" in only(check_launchers()).text


def test_allocations_are_named() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "8"}
    (finding,) = allocation(slurm)
    assert finding.text == "job 7: nodes: 2, tasks: 8"
    assert [each.subject for each in allocation({"PBS_JOBID": "7"})] == ["PBS"]
    assert [each.subject for each in allocation({"LSB_JOBID": "7"})] == ["LSF"]
    assert list(allocation({})) == []


def test_equal_findings_of_nodes_are_shown_once() -> None:
    slow = Finding("limits", "open files", "64", "warning", "ulimit")
    python = Finding("software", "Python", "3.11")
    by_node = {
        "a": [python, Finding("tiers", "/x:1GiB", "1 GiB free")],
        "b": [python, Finding("tiers", "/x:1GiB", "2 GiB free"), slow],
    }
    python, limits, tier = merged(by_node)
    assert (python.text, python.where) == ("3.11", ())
    assert limits.where == ("b",)
    assert tier.text == "1 GiB free (similar on the others)"
    assert worst([python, limits]) == "warning"


def test_the_remedy_of_an_error_is_kept() -> None:
    finding = lost_ranks("srun started 4 (N=4), so: do this; or: that")
    assert (finding.text, finding.remedy) == ("srun started 4 (N=4), so", "do this; or: that")


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        writes, reads = measure_folder(folder, 8 << 20)
    finally:
        os.close(folder)
    assert min(writes, reads) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_command_tells_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = DoctorOptions(tiers=f"{tmp_path}:1TiB", quick=True)
    result = examine(options, SingleCommunicator())
    subjects = {each["subject"] for each in result["findings"]}
    assert {"Python", "torch", "MPI", "memory", "/dev/shm", "ranks"} <= subjects
    assert result["ranks"] == len(result["nodes"]) == 1
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--tiers", "nonsense"])
    assert ended.value.code == 2
    assert "/local/scratch" in " ".join(capsys.readouterr().out.split())


def test_the_process_that_loads_mpi_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    probe_mpi()
    assert list(tmp_path.iterdir()) == []
