"""A notice that any rank may give is printed by one rank of each node."""

import subprocess
import sys
from pathlib import Path

from dlio.comm.single import SingleCommunicator
from dlio.integrations.script.node_claims import NodeClaims

_SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, _ in DataLoader(TensorDataset(torch.randn(24, 4), torch.zeros(24)), 12):
    x.requires_grad_()
    torch.autograd.grad(model(x).square().sum().sqrt(), x)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def test_each_text_is_of_one_claim_in_a_job() -> None:
    comm = SingleCommunicator()
    with NodeClaims(comm) as claims, NodeClaims(comm) as others:
        assert claims.is_first("a")
        assert claims.is_first("b")
        assert not claims.is_first("a")
        assert others.is_first("a")


def test_a_notice_that_all_ranks_have_is_printed_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "dlio.cli", "run", "-n", "3", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torch.autograd.grad gives gradients of samples") == 1, done.stderr
