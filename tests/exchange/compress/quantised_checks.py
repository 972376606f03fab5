"""Checks of sums of compressed gradients, on any number of ranks: `quantised_checks.py CHECK`."""

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator, world
from dlio.errors import CommTimeout, UsageError
from dlio.exchange.compress import NAMES, make_compressor
from dlio.exchange.compress.message_layout import ChunkScratch, pieces_of, split
from dlio.exchange.quantised_allreduce import TAGS, QuantisedAllreduce
from dlio.plan.sum_grid import hops

LAYOUT: Final[Sequence[tuple[str, Sequence[int]]]] = (
    ("conv.weight", (40, 30, 3, 3)),
    ("conv.bias", (40,)),
    ("norm.weight", (40,)),
    ("fc.weight", (50, 1200)),
    ("fc.bias", (50,)),
)
ENTRIES: Final = 40 * 30 * 9 + 40 + 40 + 50 * 1200 + 50
_TAG = 7


def check_sums(comm: Communicator) -> None:
    """All ranks get the same bytes, and the residuals hold the rest of the sum, at every step."""
    for name in NAMES:
        reduction = QuantisedAllreduce(comm, LAYOUT, name, _TAG)
        applied, inputs = np.zeros(ENTRIES), np.zeros(ENTRIES)
        for step in range(4):
            region = _gradient(step, comm.rank)
            inputs += sum(_gradient(step, rank).astype(np.float64) for rank in range(comm.size))
            reduction.start(torch.from_numpy(region))
            reduction.wait()
            assert _same_everywhere(comm, region), f"{name}: ranks differ at step {step}"
            applied += region
            residuals = _sum(comm, reduction.residual)
            error = np.abs(applied + residuals - inputs).max()
            assert error < 1e-5, f"{name}, step {step}: {error} was lost"
        if comm.size > 1:
            assert np.abs(applied - inputs).max() > 1e-5, f"{name} compressed nothing"
        reduction.close()


_MESSAGES: Final = {5: 6, 6: 6, 7: 8, 8: 8, 16: 12, 32: 20}
"""Messages a sum of the rank that sends most, where ranks are a grid."""


def check_counts(comm: Communicator) -> None:
    """The counts of messages and bytes follow from the parts of a region.

    In a grid messages are fewer, and no rank sends half as many bytes again as in one hop.
    """
    if comm.size in _MESSAGES:
        _check_grid_counts(comm)
        return
    for name in NAMES:
        reduction = QuantisedAllreduce(comm, LAYOUT, name, _TAG)
        for step in range(3):
            reduction.start(torch.from_numpy(_gradient(step, comm.rank)))
            reduction.wait()
        ways = 1 if comm.size == 2 else 2
        parts = [
            make_compressor(name, part, ChunkScratch()).max_bytes
            for part in split(pieces_of(LAYOUT), 1 if ways == 1 else comm.size)
        ]
        others = comm.size - 1
        most = 3 * parts[0]
        if ways == 2:
            most = 3 * (sum(parts) + (others - 1) * parts[comm.rank])
        counted = reduction.statistics()
        assert counted["messages"] == 3 * ways * others
        assert counted["wait_s"] >= 0
        if name in ("threshold", "adaptive"):
            assert 0 < counted["bytes"] <= most
        else:
            assert counted["bytes"] == most
        # The bytes of a ring allreduce of float32.
        assert most <= 3 * (2 * others / comm.size) * 4 * ENTRIES / _ratio(name) * 1.1
        reduction.close()


def _check_grid_counts(comm: Communicator) -> None:
    layout = [("w", (32, 4100))]
    entries = 32 * 4100
    for name in ("int8", "bf16", "onebit"):
        reduction = QuantisedAllreduce(comm, layout, name, _TAG)
        for step in range(2):
            reduction.start(torch.from_numpy(np.resize(_gradient(step, comm.rank), entries)))
            reduction.wait()
        counted = comm.allgather({**reduction.statistics()})
        assert max(each["messages"] for each in counted) == 2 * _MESSAGES[comm.size]
        whole = make_compressor(name, pieces_of(layout), ChunkScratch()).max_bytes
        one_hop = 2 * 2 * (comm.size - 1) / comm.size * whole
        assert max(each["bytes"] for each in counted) <= 1.25 * one_hop
        assert sum(each["bytes"] for each in counted) <= 1.02 * comm.size * one_hop
        reduction.close()


def check_bounded(comm: Communicator) -> None:
    """The values that sums have missed stay below the bound of the module's docstring, after any
    number of sums, and are not far from those of one hop."""
    entries = 6 * 4096
    hop_count = len(hops(comm.size, comm.rank))
    reduction = QuantisedAllreduce(comm, [("w", (6, 4096))], "int8", _TAG)
    each = [_gradient(0, rank)[:entries] for rank in range(comm.size)]
    exact = np.sum(each, axis=0, dtype=np.float64)
    largest = float(np.abs(each).max())
    missed = np.zeros(entries)
    for _ in range(100):
        region = each[comm.rank].copy()
        reduction.start(torch.from_numpy(region))
        reduction.wait()
        missed += exact - region
        assert np.abs(missed).max() <= (hop_count + 1) * comm.size * largest / 100
    # Residuals of a hop are of as many roundings as there are ranks, each of a partial sum.
    assert np.sqrt(np.mean(missed**2)) <= 1.5 * np.sqrt(comm.size) * largest / 128
    reduction.close()


def check_restored(comm: Communicator) -> None:
    """A sum that goes on from a saved state gives the same bytes as the one that was saved."""
    for name in NAMES:
        reduction = QuantisedAllreduce(comm, LAYOUT, name, _TAG)
        for step in range(6):
            saved = {key: value.clone() for key, value in reduction.state().items()}
            anew = QuantisedAllreduce(comm, LAYOUT, name, _TAG + TAGS)
            anew.load_state(saved)
            expected, region = _gradient(step, comm.rank), _gradient(step, comm.rank)
            reduction.start(torch.from_numpy(expected))
            anew.start(torch.from_numpy(region))
            reduction.wait()
            anew.wait()
            assert np.array_equal(region, expected), f"{name} differs at step {step}"
            anew.close()
        reduction.close()


class _ShrinkingComm:
    """A communicator that can be exchanged for one of fewer ranks, as after a loss."""

    def __init__(self, comm: Communicator) -> None:
        self.now = comm

    def __getattr__(self, name: str) -> object:
        return getattr(self.now, name)


def check_shrunk(comm: Communicator) -> None:
    """After a loss a sum can be undone; the ranks that are left sum in a grid of their own."""
    shrinking: Any = _ShrinkingComm(comm)
    reduction = QuantisedAllreduce(shrinking, LAYOUT, "int8", _TAG, keeps=True)
    for step in range(3):
        before = reduction.residual.copy()
        reduction.start(torch.from_numpy(_gradient(step, comm.rank)))
        reduction.wait()
    assert not np.array_equal(reduction.residual, before)
    for left in range(comm.size - 1, 0, -1):
        lost = comm.rank >= left
        shrinking.now = comm.split(int(lost))
        if lost:
            # Ranks that are gone: only the calls that all ranks make together are made here.
            continue
        reduction.reset(undo=True)
        assert np.array_equal(reduction.residual, before)
        region = _gradient(9, comm.rank)
        owed = _sum(shrinking, before) if left > 1 else before.astype(np.float64)
        exact = sum(_gradient(9, rank).astype(np.float64) for rank in range(left)) + owed
        reduction.start(torch.from_numpy(region))
        reduction.wait()
        rest = _sum(shrinking, reduction.residual) if left > 1 else 0.0
        assert np.abs(region + rest - exact).max() < 1e-5
        assert _same_everywhere(shrinking, region)
    reduction.close()


def check_feedback(comm: Communicator) -> None:
    """Constant gradients are exact on average over steps: residuals do not grow."""

    def gradient(rank: int) -> npt.NDArray[np.float32]:
        # One-bit would need thousands of steps for an entry that is far larger than its row.
        return np.clip(_gradient(0, rank)[:9000], -0.02, 0.02)

    mean = sum(gradient(rank).astype(np.float64) for rank in range(comm.size))
    for name in NAMES:
        reduction = QuantisedAllreduce(comm, [("w", (30, 300))], name, _TAG)
        applied = np.zeros(9000)
        errors = []
        for step in range(1, 501):
            region = gradient(comm.rank)
            reduction.start(torch.from_numpy(region))
            reduction.wait()
            applied += region
            if step in (125, 500):
                errors.append(float(np.sqrt(np.mean((applied / step - mean) ** 2))))
        size = float(np.sqrt(np.mean(np.square(mean))))
        assert errors[1] < max(0.6 * errors[0], 1e-6 * size), f"{name}: {errors} of {size}"
        reduction.close()


def check_interleaved(comm: Communicator) -> None:
    """Several regions reduced at once, by `advance` alone, have the sums that each has alone.

    Some regions have fewer entries than there are ranks.
    """
    layouts = [LAYOUT, [("w", (1,))], [("w", (2, 5000))], [], [("b", (3,))]]
    names = ("onebit", "adaptive", "bf16", "int8", "fp16")

    def reductions() -> list[QuantisedAllreduce]:
        scratch = ChunkScratch()
        return [
            QuantisedAllreduce(comm, layout, name, _TAG + TAGS * number, scratch)
            for number, (layout, name) in enumerate(zip(layouts, names, strict=True))
        ]

    together, alone = reductions(), reductions()
    for step in range(5):
        regions = [_gradient(step, comm.rank)[: each.entries] for each in together]
        for reduction, region in zip(together, regions, strict=True):
            reduction.start(torch.from_numpy(region))
        deadline = time.monotonic() + 30
        under_way = list(together)
        while under_way := [each for each in under_way if not each.advance()]:
            assert time.monotonic() < deadline
            time.sleep(1e-4)
        for reduction, region in zip(alone, regions, strict=True):
            expected = _gradient(step, comm.rank)[: reduction.entries]
            reduction.start(torch.from_numpy(expected))
            reduction.wait()
            assert _same_everywhere(comm, region)
            assert np.array_equal(region, expected)
    for reduction in together + alone:
        reduction.close()


def check_deadline(comm: Communicator) -> None:
    """The error names a late rank; waiting again succeeds and loses nothing."""
    reduction = QuantisedAllreduce(comm, LAYOUT, "onebit", _TAG)
    region = _gradient(0, comm.rank)
    last = comm.size - 1
    if comm.rank != last:
        reduction.start(torch.from_numpy(region))
        try:
            reduction.wait(timeout_s=0.2)
            raise AssertionError("the sum came without a rank's share")
        except CommTimeout as error:
            assert f"compressed gradients of rank {last}" in str(error)  # noqa: PT017
        try:
            reduction.start(torch.from_numpy(region))
            raise AssertionError("a sum is under way")
        except UsageError as error:
            assert "call wait()" in str(error)  # noqa: PT017
    comm.barrier()
    if comm.rank == last:
        reduction.start(torch.from_numpy(region))
    reduction.wait(timeout_s=30)
    assert _same_everywhere(comm, region)
    reduction.close()


def check_given_up(comm: Communicator) -> None:
    """A reduction that the other ranks abandoned is closed, and its memory can be freed."""
    reduction = QuantisedAllreduce(comm, LAYOUT, "adaptive", _TAG)
    if comm.rank == 0:
        reduction.start(torch.from_numpy(_gradient(0, 0)))
    reduction.close()
    assert reduction.done()
    comm.barrier()


def check_training(comm: Communicator) -> None:
    """On least squares, compressed gradients converge as exact ones do."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(8, 200, generator=generator)
    inputs = torch.randn(comm.size * 400, 200, generator=generator)
    labels = inputs @ truth.T
    mine = slice(comm.rank * 400, (comm.rank + 1) * 400)
    for name in NAMES:
        reduction = QuantisedAllreduce(comm, [("w", (8, 200))], name, _TAG)
        weights = torch.zeros(8, 200)
        for step in range(400):
            slope = (inputs[mine] @ weights.T - labels[mine]).T @ inputs[mine] / len(inputs)
            region = slope.contiguous().numpy().reshape(-1)
            reduction.start(torch.from_numpy(region))
            reduction.wait()
            rate = {"onebit": 0.02, "ternary": 0.02, "threshold": 0.01, "adaptive": 0.01}.get(
                name, 0.1
            )
            weights -= rate * torch.from_numpy(region).view(8, 200)
            if step % 50 == 49:
                weights -= rate * torch.from_numpy(_sum(comm, reduction.residual)).view(8, 200)
                reduction.residual[:] = 0
        error = float((weights - truth).square().mean())
        limit = {"onebit": 0.01, "ternary": 0.01, "threshold": 0.05, "adaptive": 0.05}.get(
            name, 1e-4
        )
        assert error < limit, f"{name}: error {error}"
        reduction.close()


CHECKS: Final[dict[str, Callable[[Communicator], None]]] = {
    "sums": check_sums,
    "counts": check_counts,
    "bounded": check_bounded,
    "restored": check_restored,
    "shrunk": check_shrunk,
    "feedback": check_feedback,
    "interleaved": check_interleaved,
    "deadline": check_deadline,
    "given_up": check_given_up,
    "training": check_training,
}


def _gradient(step: int, rank: int) -> npt.NDArray[np.float32]:
    """Draw a heavy-tailed gradient that differs by rank."""
    rng = np.random.default_rng([step, rank])
    values = rng.standard_t(3, ENTRIES) * 1e-2
    values[:1000] += 0.01
    return values.astype(np.float32)


def _ratio(name: str) -> float:
    return {
        "onebit": 30,
        "ternary": 19,
        "threshold": 90,
        "adaptive": 90,
        "int8": 3.9,
        "bf16": 2,
        "fp16": 1.99,
    }[name]


def _same_everywhere(comm: Communicator, array: npt.NDArray[np.float32]) -> bool:
    seen = comm.allgather(hashlib.sha256(array.tobytes()).hexdigest())
    return len(set(seen)) == 1


def _sum(comm: Communicator, array: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    if comm.size == 1:
        return np.zeros(ENTRIES)
    total = array.astype(np.float64)
    comm.wait([comm.iallreduce(total)], "residuals")
    return total


if __name__ == "__main__":
    torch.set_num_threads(1)
    for asked in sys.argv[1:]:
        CHECKS[asked](world())
        print(f"kept {asked}", flush=True)
