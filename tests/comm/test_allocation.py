"""The nodes of an allocation are read from the batch systems' variables."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.comm.allocation import Allocation, expand_counts, expand_hosts, find_allocation
from dlio.errors import UsageError
from dlio.launch import agent_links

_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2],m07", "SLURM_NTASKS": "5"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", "login"),
        ("n[1-3,7],login2", "n1 n2 n3 n7 login2"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"),
        ("a-[1]-gpu,b", "a-1-gpu b"),
    ],
)
def test_lists_of_hosts_are_expanded(text: str, hosts: str) -> None:
    assert expand_hosts(text) == tuple(hosts.split())


@given(st.lists(st.integers(0, 10**6), min_size=1), st.integers(1, 7))
def test_each_number_of_a_list_is_one_host(numbers: list[int], width: int) -> None:
    names = [str(number).zfill(width) for number in numbers]
    assert expand_hosts(f"n[{','.join(names)}]") == tuple(f"n{name}" for name in names)


@pytest.mark.parametrize("text", ["", ",", "n[", "n]", "n[3-1]", "n[a]", "n[1-9999999]", "a,,b"])
def test_malformed_lists_of_hosts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"not a list of Slurm's"):
        expand_hosts(text)


@given(st.lists(st.integers(1, 9), min_size=1))
def test_numbers_of_tasks_are_expanded(counts: list[int]) -> None:
    written = re.sub(r"(\d)(?:,\1)+", lambda m: f"{m[1]}(x{len(m[0]) // 2 + 1})", _joined(counts))
    assert expand_counts(written) == tuple(counts)


def _joined(counts: list[int]) -> str:
    return ",".join(map(str, counts))


@pytest.mark.parametrize(
    ("more", "slots"),
    [
        ({"SLURM_TASKS_PER_NODE": "2(x2),1"}, (2, 2, 1)),
        ({"SLURM_NTASKS": "", "SLURM_TASKS_PER_NODE": "48(x3)"}, (1, 1, 1)),  # Cores.
        ({"SLURM_NTASKS": "", "SLURM_GPUS_ON_NODE": "4"}, (4, 4, 4)),
    ],
)
def test_slurm_tells_nodes_and_tasks(more: dict[str, str], slots: tuple[int, ...]) -> None:
    assert find_allocation({**_SLURM, **more}) == Allocation(
        "Slurm", "7", ("n1", "n2", "m07"), slots
    )


def test_tasks_of_srun_and_processes_outside_of_jobs_have_no_allocation() -> None:
    assert find_allocation({**_SLURM, "SLURM_STEP_ID": "0"}) is None
    assert find_allocation({}) is None
    interactive = {**_SLURM, "SLURM_STEP_ID": "4294967290", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert find_allocation(interactive) is not None


def test_numbers_for_other_nodes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"for 1 nodes?, but the list of nodes n\[1-2\],m07"):
        find_allocation({**_SLURM, "SLURM_TASKS_PER_NODE": "5"})


def test_files_of_pbs_and_lsf_list_each_slot(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a\na\nb\n")
    pbs = find_allocation({"PBS_NODEFILE": str(path), "PBS_JOBID": "3.server"})
    assert pbs == Allocation("PBS", "3.server", ("a", "b"), (2, 1))
    path.write_text("batch5\na\na\nb\n")
    lsf = find_allocation({"LSB_DJOB_HOSTFILE": str(path), "LSB_JOBID": "3"})
    assert lsf == Allocation("LSF", "3", ("a", "b"), (2, 1))
    assert find_allocation({"LSB_MCPU_HOSTS": "batch5 1 a 2 b 1", "LSB_JOBID": "3"}) == lsf
    with pytest.raises(UsageError, match=r"PBS_NODEFILE=.*nowhere cannot be read"):
        find_allocation({"PBS_NODEFILE": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    ("ranks", "per_node", "counts"),
    [
        (None, None, {"a": 2, "b": 2, "c": 1}),
        (5, None, {"a": 2, "b": 2, "c": 1}),
        (4, None, {"a": 2, "b": 1, "c": 1}),
        (1, None, {"a": 1}),
        (None, 1, {"a": 1, "b": 1, "c": 1}),
        (5, 4, {"a": 4, "b": 1}),
    ],
)
def test_ranks_are_spread_over_the_hosts(
    ranks: int | None, per_node: int | None, counts: dict[str, int]
) -> None:
    allocation = Allocation("Slurm", "7", ("a", "b", "c"), (2, 2, 1))
    assert allocation.counts(ranks, per_node) == counts


def test_more_ranks_than_the_nodes_take_are_refused() -> None:
    with pytest.raises(UsageError, match=r"-n 7: 3 nodes? of 2 ranks have 6"):
        Allocation("Slurm", "7", ("a", "b", "c"), (2, 2, 2)).counts(7, 2)


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=true", "a b", "a;b", "a:b", "", "a" * 300, "\x1b[2J"]
)
# SECURITY.md: S9
def test_no_other_text_than_a_host_becomes_a_word_of_a_command(host: str) -> None:
    with pytest.raises(UsageError, match="not the name of a host"):
        Allocation("Slurm", "7", (host,), (1,))
    with pytest.raises(UsageError, match="not the name of a host"):
        agent_links._command(host, "dlio.cli")
    assert agent_links._command("n1.cluster", "dlio.cli")[2:4] == ["--", "n1.cluster"]
