"""`dlio bench chaos --case nodes`: its figures, and a job whose nodes are lost and cut off."""

import json
from pathlib import Path

import pytest

from dlio.cli import main
from dlio.errors import UsageError
from dlio.launch.node import node_agent
from dlio_bench.chaos import pretended_nodes
from dlio_bench.chaos.accounts import quantiles
from dlio_bench.chaos.chaos_options import ChaosOptions
from dlio_bench.chaos.node_storm import NodeJob, Outage, figures_of_nodes
from dlio_bench.chaos.pretended_nodes import may_pretend


def test_figures_are_of_the_jobs() -> None:
    well = NodeJob(
        outages=[Outage("node", "B", 10.0, 11.5), Outage("cut", "A", 20.0, 24.0)],
        code=0,
        uneven=[],
        losses=[{"kind": "restart", "steps_again": 1}, {"kind": "lost", "steps_again": 7}],
        changes=[{"kind": "joined", "seconds": 0.5}, {"kind": "left", "seconds": 9.0}],
        counted_s=30.0,
        wall_s=40.0,
    )
    failed = NodeJob(outages=[Outage("node", "C", 5.0)], code=1, errors="dlio: error: x")
    uneven = NodeJob(code=0, uneven=[{"epoch": 0, "lost": 2, "doubled": 3, "problems": 4}])
    hung = NodeJob(code=None, hung=True)
    figures = figures_of_nodes([well, failed, uneven, hung])
    assert figures["faults"] == {"node": 2, "cut": 1}
    assert figures["unnoticed"] == 1
    assert figures["node_next_step_s"] == quantiles([1.5])
    assert figures["cut_next_step_s"] == quantiles([4.0])
    assert (figures["jobs"], figures["failed_jobs"], figures["hangs"]) == (4, 1, 1)
    assert (figures["samples_lost"], figures["samples_doubled"]) == (2, 3)
    assert figures["ledger_problems"] == 4
    assert figures["steps_redone_most"] == 1
    assert (figures["joined"], figures["joining_s"]) == (1, quantiles([0.5]))
    assert figures["ettr"] == 0.75


def test_words_of_an_agent_pass_through_relays_that_can_be_cut(tmp_path: Path) -> None:
    """The pretended remote shell knows an agent by the name of its module."""
    shell = Path(pretended_nodes.__file__).with_name("fakessh").read_text(encoding="utf-8")
    assert f"*{node_agent.__name__}*" in shell
    with pytest.raises(RuntimeError, match="nothing of node B passes through relays"):
        pretended_nodes.PretendedNodes(tmp_path).cut("B")


def test_faults_of_nodes_are_known() -> None:
    with pytest.raises(UsageError, match="--node-faults fire: choose node or cut"):
        ChaosOptions(node_faults="node,fire")


@pytest.mark.mpi
@pytest.mark.cold
@pytest.mark.nightly
@pytest.mark.alone  # Segments of other tests' jobs would be taken for its own.
@pytest.mark.skipif(not may_pretend(), reason="this user may not have UTS namespaces")
def test_nodes_are_lost_and_cut_off_and_no_sample_is(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    argv = ["bench", "chaos", "--case", "nodes", "-n", "4", "--nodes", "2", "--kills", "2"]
    argv += ["--every", "2", "--epochs", "40", "--node-faults", "node,cut", "--report", str(report)]
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert not end.value.code
    figures = json.loads(report.read_text())["nodes"]
    assert figures["faults"] == {"node": 1, "cut": 1}
    assert (figures["samples_lost"], figures["samples_doubled"]) == (0, 0)
    assert (figures["hangs"], figures["failed_jobs"]) == (0, 0)
    assert figures["joined"] >= 1
    assert figures["steps_redone_most"] <= 1
    assert (figures["left_processes"], figures["left_files"]) == (0, [])
    assert figures["shared_memory_left"] == []
