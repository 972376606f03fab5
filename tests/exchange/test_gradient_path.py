"""A gradient goes the way from backward to the optimizer that docs/design/gradient-path.md says."""

import re
import sys
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from dlio.comm import Communicator
from dlio.exchange.distribute import ExchangeHandle
from dlio.exchange.exchange_spec import parse_exchange
from dlio.testing import run_ranks
from tests.conftest import ROOT

DOC = ROOT / "docs" / "design" / "gradient-path.md"
Call = tuple[str, str]
"""(module, function)."""

STEP: list[Call] = [
    ("dlio.exchange.distribute", "ExchangeHandle.weigh"),
    ("dlio.exchange.synchronous_sgd", "SynchronousSgd.weigh"),
    ("dlio.exchange.synchronous_sgd", "SynchronousSgd._gradient_ready"),
    ("dlio.exchange.sums", "AllreduceSum.start"),
    ("dlio.testing.thread_ranks", "ThreadCommunicator.iallreduce"),
    ("dlio.exchange.synchronous_sgd", "SynchronousSgd._backward_ends"),
    ("dlio.exchange.synchronous_sgd", "SynchronousSgd._average"),
    ("dlio.exchange.synchronous_sgd", "SynchronousSgd.sum_all"),
    ("dlio.exchange.synchronous_sgd", "SynchronousSgd.before_step"),
]
"""The calls of one step, in order."""


def _step(comm: Communicator) -> tuple[list[Call], set[str]]:
    """Make a step, and return its calls in order and the classes that values were handed to."""
    made: list[Call] = []
    handed: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith("dlio."):
            return
        code = frame.f_code
        made.append((module, code.co_qualname))
        values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        if any(isinstance(each, torch.Tensor | np.ndarray) for each in values[1:]):
            handed.add(code.co_qualname)

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ExchangeHandle(parse_exchange("allreduce"), comm) as handle:
        handle.add(optimizer, list(model.named_parameters()), list(model.modules()))
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            handle.weigh(2.0)
            model(torch.ones(2, 3) * (comm.rank + 1)).sum().backward()
            optimizer.step()
        finally:
            sys.setprofile(before)
    return made, handed


def _steps() -> list[tuple[list[Call], set[str]]]:
    """Return the steps of two ranks."""
    steps: list[tuple[list[Call], set[str]]] = []
    run_ranks(2, lambda comm: steps.append(_step(comm)))
    assert len(steps) == 2
    return steps


def test_a_step_makes_the_documented_calls_in_order() -> None:
    for made, _ in _steps():
        at = 0
        for call in STEP:
            assert call in made[at:], f"{call} is not called, or earlier than documented"
            at = made.index(call, at) + 1


def test_the_page_names_the_calls_of_a_step_in_order() -> None:
    step = DOC.read_text(encoding="utf-8").split("## Each step")[1].split("`StepPhase` draws")[0]
    at = step.index("1. ")
    for _, function in STEP:
        if function == "SynchronousSgd.weigh":
            continue  # Step 1 names the class alone.
        name = function.rpartition(".")[2]
        place = step.find(name, at)
        assert place >= 0, f"{function} is not named, or not in this place"
        at = place + len(name)


def test_a_gradient_passes_the_objects_of_the_page_and_no_others() -> None:
    page = DOC.read_text(encoding="utf-8")
    [sentence] = re.findall(r"A gradient passes four objects: (.*?)\.\n", page)
    objects = set(re.findall(r"`(\w+)`", sentence))
    assert len(objects) <= 4
    names = {"AllreduceSum": "Sum", "ThreadCommunicator": "Communicator"}
    for _, handed in _steps():
        # Private classes are parts of these. The handle is handed weights and calls, no values.
        owners = {each.split(".")[0] for each in handed if "." in each and each[0] != "_"}
        assert {names.get(each, each) for each in owners} | {"ExchangeHandle"} == objects
