"""Losses of many kinds, as ranks of mpirun: each trains as one process does, or a line says not."""

import logging
from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import dlio
from dlio.comm import world
from dlio.exchange.distribute import ExchangeHandle

_Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Loss = Callable[[torch.Tensor, torch.Tensor, _Batch], torch.Tensor]
_said: list[str] = []
_BATCH: Final = 8
"""Samples of all ranks in a step."""
_sum: Final = nn.MSELoss(reduction="sum")
_tokens: Final = nn.CrossEntropyLoss()


class _Kept(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _said.append(record.getMessage())


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.many = nn.Linear(6, 3), nn.Linear(6, 15)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.many(x).view(-1, 5, 3)


def _masked(many: torch.Tensor, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (batch[2] != -100).float()
    return (many.square().mean(-1) * mask).sum(), mask.sum()


def _over_all_items(one: torch.Tensor, many: torch.Tensor, batch: _Batch) -> torch.Tensor:
    """Divide by the items of all ranks, as detectors do by boxes."""
    total, items = _masked(many, batch)
    of_all = sum(world().allgather(float(items))) if _ranks > 1 else float(items)
    return total / max(of_all / _ranks, 1.0)


def _grown(value: torch.Tensor) -> torch.Tensor:
    """Multiply by a coefficient that grows from step to step, as that of a divergence does."""
    _steps.append(1)
    return value * (0.0003 * len(_steps))


_steps: list[int] = []
_ranks = 1
"""Ranks that the losses know of."""
_SOUND: Final[dict[str, _Loss]] = {
    "mean": lambda one, many, batch: functional.cross_entropy(one, batch[1]),
    "smooth": lambda one, many, batch: functional.cross_entropy(one, batch[1], label_smoothing=0.1),
    "accumulated": lambda one, many, batch: functional.cross_entropy(one, batch[1]) / 4,
    "unused": lambda one, many, batch: _sum(one, batch[3]) / len(one) + 0 * many.sum(),
    "batchmean": lambda one, many, batch: functional.kl_div(
        one.log_softmax(-1), batch[3].softmax(-1), reduction="batchmean"
    ),
    "penalty": lambda one, many, batch: (
        functional.cross_entropy(one, batch[1])
        + 0.01 * sum(p.square().sum() for p in _net.parameters())
    ),
    "inverse": lambda one, many, batch: _sum(one, batch[3]) * (1 / len(one)) * 0.37,
    "each": lambda one, many, batch: torch.stack(
        [functional.mse_loss(a, b) for a, b in zip(one, batch[3], strict=True)]
    ).mean(),
}
_EVEN: Final[dict[str, _Loss]] = {
    "nominal": lambda one, many, batch: _sum(one, batch[3]) / (_BATCH // _ranks),
    "of all": lambda one, many, batch: _sum(one, batch[3]) / _BATCH * _ranks,
    "times ranks": lambda one, many, batch: _sum(one, batch[3]) * _ranks,
}
"""Sound where the ranks have equal parts."""
_TOLD: Final[dict[str, tuple[_Loss, str]]] = {
    "sum": (lambda one, many, batch: _sum(one, batch[3]), "a sum over samples there (mse_loss), "),
    "constant": (lambda one, many, batch: _sum(one, batch[3]) / 7, "divided by 7, which is not"),
    "coefficient": (
        lambda one, many, batch: functional.cross_entropy(one, batch[1]) + _grown(many.abs().sum()),
        "a sum over samples there (sum), divided by",
    ),
    "activity": (
        lambda one, many, batch: functional.cross_entropy(one, batch[1]) + many.abs().sum() / 1000,
        "a sum over samples there (sum), divided by 1000",
    ),
    "tokens": (
        lambda one, many, batch: _tokens(many.reshape(-1, 3), batch[2].reshape(-1)),
        "elements on rank 0 and",
    ),
    "mask": (lambda one, many, batch: torch.div(*_masked(many, batch)), "elements on rank 0 and"),
    "root": (lambda one, many, batch: functional.mse_loss(one, batch[3]).sqrt(), "the sqrt of"),
    "pairs": (
        lambda one, many, batch: functional.cross_entropy(
            one @ many[:, 0].T, torch.arange(len(one))
        ),
        "a cross entropy among the samples",
    ),
}
_net: _Net


def train(loss: _Loss, samples: int, ranks: int, weighs: bool = False) -> torch.Tensor:
    """Return the weights after three passes, on all ranks or in one process."""
    global _net, _ranks
    _steps.clear()
    torch.manual_seed(0)
    net = _Net()
    _net, _ranks = net, ranks
    optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in (net.one, net.many)]
    targets = torch.randint(0, 3, (samples, 5))
    targets[torch.rand(samples, 5) < 0.4] = -100
    classes = torch.randint(0, 3, (samples,))
    data = TensorDataset(torch.randn(samples, 6), classes, targets, torch.randn(samples, 3))

    def step(x: torch.Tensor, *batch: torch.Tensor, handle: ExchangeHandle | None = None) -> None:
        if handle is not None and weighs:
            handle.weigh(float((batch[1] != -100).sum()))
        net.zero_grad()
        one, many = net(x)
        classes, tokens, wanted = batch
        torch.autograd.backward(loss(one, many, (x, classes, tokens, wanted)))
        for optimizer in optimizers:
            optimizer.step()

    if ranks == 1:
        for _ in range(3):
            for start in range(0, samples, _BATCH):
                step(*data[start : start + _BATCH])
    else:
        loader = dlio.DataLoader(data, _BATCH // ranks)
        with dlio.distribute(net, optimizers) as handle:
            for _ in range(3):
                for batch in loader:
                    step(*batch, handle=handle)
    return torch.cat([each.detach().reshape(-1) for each in net.parameters()])


def check(name: str, loss: _Loss, samples: int, words: str, weighs: bool = False) -> None:
    _said.clear()
    gap = float((train(loss, samples, world().size, weighs) - train(loss, samples, 1)).abs().max())
    case = f"{name} of {samples}: {gap:.1e}, {_said}"
    assert (gap > 1e-5) == bool(words), case
    assert len(_said) == (bool(words) and world().rank == 0), case
    assert all(words in each and "loss_watch_checks.py:" in each for each in _said), case


def _check_turns() -> None:
    """A function that calls backward for three losses in turn is told of the last one, too."""
    _said.clear()
    net = nn.Linear(6, 3)
    data = TensorDataset(torch.randn(24, 6), torch.randn(24, 3))

    def step(loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)

    with dlio.distribute(net, torch.optim.SGD(net.parameters(), 0.01)):
        for x, y in dlio.DataLoader(data, 4):
            step(functional.mse_loss(net(x), y))
            step(functional.l1_loss(net(x), y))
            step(_sum(net(x), y))
    assert len(_said) == (world().rank == 0), _said
    assert all("a sum over samples there (mse_loss)" in each for each in _said), _said


def main() -> None:
    assert world().size == 2
    logging.getLogger("dlio").addHandler(_Kept())
    for name, sound in _SOUND.items():
        for samples in (40, 41, 43):  # A rank has none of the last one of 41.
            check(name, sound, samples, "")
    for name, sound in _EVEN.items():
        check(name, sound, 40, "")
        check(name, sound, 43, "by their samples, of which they have unequal parts here")
    for name, (loss, words) in _TOLD.items():
        check(name, loss, 40, words)
    check("items of all", _over_all_items, 40, "")
    check("items of all", _over_all_items, 45, "elements on rank 0 and")
    _check_turns()
    check("weighed tokens", _TOLD["tokens"][0], 40, "", weighs=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
