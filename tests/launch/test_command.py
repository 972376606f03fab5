"""Mistakes in the options of jobs that start again."""

import pytest

from dlio.cli.train_command import run
from dlio.errors import UsageError
from dlio.train.config import train_config


@pytest.mark.parametrize("nodes", ["a,no/node", "a,,b", "a,a", "-x", "a;b", "a b"])
def test_names_of_nodes_are_checked(nodes: str) -> None:
    with pytest.raises(UsageError, match=r"--nodes .*: give names of nodes, each once"):
        train_config(source="data", nodes=nodes)


def test_each_node_needs_a_rank() -> None:
    with pytest.raises(UsageError, match="--nodes a,b: give -n with at least 2 ranks"):
        run(train_config(source="data", nodes="a,b"), 1)


def test_only_ranks_that_dlio_starts_begin_again() -> None:
    with pytest.raises(UsageError, match="--nodes needs -n, too"):
        run(train_config(source="data", nodes="a,b"), None)
    again = train_config(source="data", fault_tolerance="restart", checkpoint="c")
    with pytest.raises(UsageError, match="--fault-tolerance restart needs -n, too"):
        run(again, None)


def test_a_restart_needs_checkpoints() -> None:
    with pytest.raises(UsageError, match="--fault-tolerance restart needs --checkpoint, too"):
        train_config(source="data", fault_tolerance="restart")
