"""Compare the ranks' weights every few steps, and restore those of a rank that differs.

The ranks of an exchange that sums gradients have the same weights, bit for bit. A rank that differs
has a fault: of its memory, of its processor, or of a program.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import nn

from dlio.comm.survival.recovery import uniform
from dlio.errors import DlioError
from dlio.exchange.buckets import broadcast_tensors
from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.callbacks.rank_roster import RankRoster
from dlio.train.report import RestoredRank, RunReport


def weights_digest(model: nn.Module) -> int:
    """Return 64 bits, as a signed number, that differ if any bit of the parameters does."""
    hashed = xxhash.xxh3_64()
    for parameter in model.parameters():
        hashed.update(_bytes_of(parameter).data)
    return int.from_bytes(hashed.digest(), "little", signed=True)


def majority(digests: Sequence[int]) -> int | None:
    """Return the digest that more than half of the ranks have, None if there is none."""
    digest, ranks = Counter(digests).most_common(1)[0]
    return digest if 2 * ranks > len(digests) else None


class WeightGuard(Callback):
    """Compares a digest of each rank's weights every so many steps, by a sum of 8 bytes per rank.

    A rank that differs gets weights, buffers and the optimizer's state of the first rank that has
    what more than half of them have.
    """

    def __init__(self) -> None:
        self._members: RankRoster | None = None
        self._alike_at = 0
        self._repairs: list[RestoredRank] = []
        """Of this step."""
        self._restored: list[RestoredRank] = []

    def begins(self, run: Run) -> None:
        self._members = RankRoster(run)
        self._alike_at = run.updates

    def after_step(self, run: Run) -> None:
        every = run.config.callbacks.check_weights
        if run.comm.size == 1 or every is None or run.updates % every:
            return
        uniform(run.comm, lambda: self._compare(run))
        if run.comm.rank == 0:
            for repair in self._repairs:
                print(repair.sentence(), flush=True)
        self._restored += self._repairs
        self._repairs, self._alike_at = [], run.updates

    def add_results(self, report: RunReport) -> None:
        report.restored += self._restored

    def _compare(self, run: Run) -> None:
        """Compare digests, and restore ranks that differ. Collective; may be called again."""
        comm = run.comm
        digests = np.zeros(comm.size, np.int64)
        digests[comm.rank] = weights_digest(run.model)
        comm.wait([comm.iallreduce(digests)], "digests of the other ranks' weights")
        if (digests == digests[0]).all():
            return
        usual = majority(digests.tolist())
        if usual is None:
            raise DlioError(
                f"{self._everyone()} have different weights since a step after "
                f"{self._alike_at} (seen at step {run.updates}), and no weights are those of most "
                "ranks: check these machines' memory, and resume from a checkpoint (--resume) "
                f"of step {self._alike_at} or before"
            )
        odd = np.flatnonzero(digests != usual).tolist()
        giver = int(np.flatnonzero(digests == usual)[0])
        assert self._members is not None
        members = self._members.present()
        steps = self._alike_at, run.updates
        self._repairs = [
            RestoredRank(member, self._members.node(member), *steps, members[giver])
            for member in (members[rank] for rank in odd)
        ]
        _restore(run, giver, comm.rank in odd)

    def _everyone(self) -> str:
        assert self._members is not None
        names = [self._members.name(member) for member in self._members.present()]
        return f"ranks {', '.join(names[:-1])} and {names[-1]}"


@torch.no_grad()
def _restore(run: Run, giver: int, odd: bool) -> None:
    """Give one rank's state to those that are odd. Collective."""
    # The others keep their own: copies of them take the message.
    taking = (tensor if odd else tensor.clone() for tensor in _state(run))
    broadcast_tensors(taking, run.comm, giver)
    if run.precision.scales:
        scale = run.comm.tell(run.precision.scaler.state_dict(), giver)
        if odd:
            run.precision.scaler.load_state_dict(scale)


def _state(run: Run) -> Iterator[torch.Tensor]:
    """Yield the tensors of the model and of the optimizer, in the same order on all ranks."""
    yield from run.model.parameters()
    yield from run.model.buffers()
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            state = run.optimizer.state.get(parameter, {})
            yield from (state[key] for key in sorted(state) if torch.is_tensor(state[key]))


def _bytes_of(parameter: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a parameter's memory, without a copy if it is on the host and dense."""
    host = parameter.detach().cpu()
    if host.dim() == 4 and host.is_contiguous(memory_format=torch.channels_last):
        host = host.permute(0, 2, 3, 1)
    array: npt.NDArray[np.uint8] = host.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array
