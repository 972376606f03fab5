"""The promises of an exchange of gradients or weights, each as a test that every rank runs.

    mpirun -n 3 python -m dlio.testing.exchange_suite                # every exchange of dlio
    mpirun -n 3 python -m dlio.testing.exchange_suite gossip+int8    # one of them
    torchrun --nproc-per-node 3 -m dlio.testing.exchange_suite allreduce

In pytest, subclass `ExchangeTests`; `run_ranks` runs a test on ranks that are threads.
"""

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import pytest
import torch
from torch import nn
from torch.autograd import backward

from dlio.comm import Communicator, world
from dlio.exchange import NAMES, Exchange, parse_exchange, start_exchange
from dlio.exchange.buckets import averaged_state, consensus_distance, trainable
from dlio.exchange.cut import TensorCut
from dlio.plan.order import share
from dlio.testing.communicator import check_rank, needs_partners, start_torch, stop_torch

_BATCH: Final = 4
_FEATURES: Final = 12
_CLASSES: Final = 5
_NEAR: Final = 1e-5


class ExchangeTests:
    """Tests that an exchange keeps its contract; all ranks run them in the same order."""

    name = "allreduce"
    """The exchange that `make` starts, as users write it."""
    averages_gradients = True
    """True if training on shares equals training on the whole batch."""
    reproducible = True
    """True if the same steps give the same weights, whatever the ranks' speed."""
    approaches = 1.0
    """Distance between ranks, at most, after steps on different samples; without exchange: 1."""

    def make(self, model: nn.Module, comm: Communicator) -> Exchange:
        """Start the exchange of a model; your own is a subclass of `Exchange`. Collective."""
        return start_exchange(parse_exchange(self.name), trainable(model), model.modules(), comm)

    @contextmanager
    def trained(
        self, comm: Communicator, steps: int = 0
    ) -> Iterator[tuple[nn.Sequential, Exchange]]:
        """A network and its exchange, after some steps on samples of each rank's own; closed at the
        end, unless a promise is broken: other ranks may not come as far."""
        net = _net()
        exchange = self.make(net, comm)
        if steps:
            _train_apart(net, exchange, comm, steps)
            exchange.finish()
        yield net, exchange
        exchange.close()

    @pytest.fixture
    def comm(self) -> Communicator:
        """This rank's communicator."""
        return world()

    # The gradients of a global batch.

    def test_training_on_shares_equals_training_on_the_whole(self, comm: Communicator) -> None:
        self._needs_averages()
        whole = _net()
        with self.trained(comm) as (net, exchange):
            optimizer, reference = _sgd(net), _sgd(whole)
            full = comm.size * _BATCH
            # Full batches, then smaller ones, down to a single sample: the other ranks have none.
            for step, planned in enumerate((full, full - 1, comm.size, 1, full)):
                inputs, labels = _samples(step, planned)
                mine = share(planned, comm.size, comm.rank)
                _step(net, exchange, optimizer, inputs[mine], labels[mine], planned, comm.size)
                reference.zero_grad()
                backward(_loss(whole, inputs, labels).div(planned))
                reference.step()
            exchange.finish()
            assert _difference(net, whole) < _NEAR

    def test_mean_losses_are_weighed_by_samples(self, comm: Communicator) -> None:
        self._needs_averages()
        whole = _net()
        with self.trained(comm) as (net, exchange):
            counts = [rank + 1 for rank in range(comm.size)]
            inputs, labels = _samples(0, sum(counts))
            first = sum(counts[: comm.rank])
            mine = slice(first, first + counts[comm.rank])
            exchange.weigh(counts[comm.rank])
            backward(nn.functional.cross_entropy(net(inputs[mine]), labels[mine]))
            exchange.before_step()
            backward(_loss(whole, inputs, labels).div(len(inputs)))
            assert _gradients_differ(net, whole) < _NEAR

    def test_held_backwards_add_up_to_one_average(self, comm: Communicator) -> None:
        self._needs_averages()
        whole = _net()
        with self.trained(comm) as (net, exchange):
            planned = comm.size * _BATCH
            for part in range(3):
                inputs, labels = _samples(part, planned)
                mine = share(planned, comm.size, comm.rank)
                exchange.weigh(len(mine))
                exchange.hold(part < 2)
                backward(nn.functional.cross_entropy(net(inputs[mine]), labels[mine]))
                if part < 2:
                    assert exchange.statistics()["messages"] == 0, "a held backward sent messages"
                backward(_loss(whole, inputs, labels).div(planned))
            exchange.before_step()
            assert _gradients_differ(net, whole) < _NEAR

    # The ranks' models.

    def test_ranks_that_are_alike_have_the_same_bytes(self, comm: Communicator) -> None:
        net = _net()
        exchange = self.make(net, comm)
        if not exchange.alike:
            exchange.close()
            pytest.skip("its ranks may differ")
        _train_apart(net, exchange, comm, 3)
        everyone = comm.allgather(_bytes(net).hex())
        exchange.close()
        assert len(set(everyone)) == 1, "it is `alike`, but ranks have other weights"

    def test_ranks_with_different_samples_stay_together(self, comm: Communicator) -> None:
        needs_partners(comm)
        distances = []
        for exchanged in (False, True):
            net = _net()
            exchange = self.make(net, comm) if exchanged else None
            _train_apart(net, exchange, comm, 30)
            if exchange is not None:
                exchange.finish()
                exchange.close()
            distances.append(consensus_distance(net, averaged_state(net, comm), comm))
        assert distances[1] < self.approaches * distances[0]

    def test_ranks_without_samples_take_part(self, comm: Communicator) -> None:
        with self.trained(comm) as (net, exchange):
            optimizer = _sgd(net)
            for step in range(4):
                inputs, labels = _samples(step, 1)
                mine = share(1, comm.size, comm.rank)
                _step(net, exchange, optimizer, inputs[mine], labels[mine], 1, comm.size)
            exchange.finish()
            assert all(parameter.isfinite().all() for parameter in net.parameters())
            moved = comm.allgather(_difference(net, _net()))
        assert max(moved) > 0, "the step of the one rank with a sample is lost"

    def test_weights_rest_after_finish(self, comm: Communicator) -> None:
        with self.trained(comm, 3) as (net, exchange):
            before = _bytes(net)
            comm.barrier()
            exchange.finish()
            net(_samples(0, 2)[0])
            assert _bytes(net) == before, "something was under way after finish()"

    def test_it_goes_on_with_a_network_that_was_cut(self, comm: Communicator) -> None:
        with self.trained(comm, 2) as (net, exchange):
            exchange.reshape(_halve(net))
            _train_apart(net, exchange, comm, 2)
            exchange.finish()
            assert net[0].weight.shape == (8, _FEATURES)
            assert all(parameter.isfinite().all() for parameter in net.parameters())
            same = len(set(comm.allgather(_bytes(net).hex()))) == 1
            assert same or not exchange.alike, "ranks differ after a cut"

    # State.

    def test_a_restored_exchange_trains_as_the_first_does(self, comm: Communicator) -> None:
        if not self.reproducible:
            pytest.skip("its steps depend on the ranks' speed")
        with self.trained(comm, 3) as (net, exchange):
            state = {name: tensor.clone() for name, tensor in exchange.state().items()}
            saved = copy.deepcopy(net.state_dict())
            _train_apart(net, exchange, comm, 4, first=3)
            exchange.finish()
        again = _net()
        again.load_state_dict(saved)
        resumed = self.make(again, comm)
        resumed.load_state(state)
        _train_apart(again, resumed, comm, 4, first=3)
        resumed.finish()
        resumed.close()
        assert _difference(again, net) < _NEAR

    def test_a_state_is_made_of_tensors_on_the_host(self, comm: Communicator) -> None:
        with self.trained(comm, 2) as (_, exchange):
            for name, tensor in exchange.state().items():
                assert isinstance(name, str)
                assert isinstance(tensor, torch.Tensor)
                assert tensor.device.type == "cpu"

    # Statistics, and closing.

    def test_statistics_add_up_seconds_messages_and_bytes(self, comm: Communicator) -> None:
        needs_partners(comm)
        with self.trained(comm) as (net, exchange):
            before = exchange.statistics()
            _train_apart(net, exchange, comm, 4)
            exchange.finish()
            after = exchange.statistics()
            sent = comm.allgather((after["messages"], after["bytes"]))
        assert (before["messages"], before["bytes"]) == (0, 0)
        assert after["wait_s"] >= before["wait_s"] >= 0
        assert sum(messages for messages, _ in sent) > 0
        assert sum(count for _, count in sent) > 0

    def test_one_rank_neither_copies_nor_communicates(self, comm: Communicator) -> None:
        if comm.size > 1:
            pytest.skip("there are other ranks")
        alone = _net()
        with self.trained(comm) as (net, exchange):
            inputs, labels = _samples(0, _BATCH)
            exchange.before_backward(_BATCH, _BATCH)
            backward(_loss(net, inputs, labels).div(_BATCH))
            backward(_loss(alone, inputs, labels).div(_BATCH))
            gradients = [parameter.grad for parameter in net.parameters()]
            exchange.before_step()
            exchange.after_step()
            exchange.finish()
            assert all(p.grad is g for p, g in zip(net.parameters(), gradients, strict=True))
            assert _gradients_differ(net, alone) == 0
            assert exchange.statistics()["messages"] == 0

    def test_closing_removes_its_hooks(self, comm: Communicator) -> None:
        net, alone = _net(), _net()
        self.make(net, comm).close()
        inputs, labels = _samples(comm.rank, _BATCH)
        for each in (net, alone):
            backward(_loss(each, inputs, labels))
        assert _gradients_differ(net, alone) == 0, "gradients are exchanged after close()"

    def test_the_communicator_that_it_was_given_stays_open(self, comm: Communicator) -> None:
        self.make(_net(), comm).close()
        try:
            everyone = comm.allgather(comm.rank)
        except Exception as error:
            raise AssertionError(
                f"close() has closed the caller's communicator: {error}"
            ) from error
        assert everyone == list(range(comm.size))

    def _needs_averages(self) -> None:
        if not self.averages_gradients:
            pytest.skip("it does not average gradients")


def named(name: str) -> ExchangeTests:
    """The suite of one of dlio's exchanges, with the promises that it makes."""
    spec = parse_exchange(name)
    suite = ExchangeTests()
    suite.name = name
    if spec.pairwise and spec.period > 1:
        suite.name = str(replace(spec, period=2))  # The tests have few steps.
    suite.averages_gradients = (
        spec.payload == "gradient" and spec.merge == "sum" and spec.compressor is None
    )
    suite.reproducible = spec.merge != "parzen"
    suite.approaches = 1.5 if spec.merge == "parzen" else 1.0
    return suite


def _net() -> nn.Sequential:
    """A network whose weights are the same on all ranks."""
    net = nn.Sequential(nn.Linear(_FEATURES, 16), nn.Tanh(), nn.Linear(16, _CLASSES))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return net


def _sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def _samples(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, labels); shapes (count, features) and (count,)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, _FEATURES, generator=generator)
    return inputs, torch.randint(0, _CLASSES, (count,), generator=generator)


def _loss(net: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the samples' losses."""
    return nn.functional.cross_entropy(net(inputs), labels, reduction="sum")


def _step(
    net: nn.Module,
    exchange: Exchange,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    planned: int,
    ranks: int,
) -> None:
    """One step as the trainer makes it."""
    exchange.before_backward(len(inputs), planned)
    optimizer.zero_grad()
    if len(inputs):
        backward(_loss(net, inputs, labels).div(planned / ranks))
    exchange.before_step()
    optimizer.step()
    exchange.after_step()


def _train_apart(
    net: nn.Module, exchange: Exchange | None, comm: Communicator, steps: int, first: int = 0
) -> None:
    """Train on samples of this rank's own."""
    optimizer = _sgd(net)
    for step in range(first, first + steps):
        inputs, labels = _samples(1000 * (comm.rank + 1) + step, _BATCH)
        if exchange is None:
            optimizer.zero_grad()
            backward(_loss(net, inputs, labels).div(_BATCH))
            optimizer.step()
        else:
            _step(net, exchange, optimizer, inputs, labels, comm.size * _BATCH, comm.size)


def _halve(net: nn.Sequential) -> Sequence[TensorCut]:
    """Remove every second neuron of the hidden layer."""
    stay = torch.arange(0, 16, 2)
    cuts = []
    for name, dim in (("0.weight", 0), ("0.bias", 0), ("2.weight", 1)):
        parameter = net.get_parameter(name)
        before = tuple(parameter.shape)
        parameter.data = parameter.data.index_select(dim, stay)
        parameter.grad = None
        cuts.append(TensorCut(name, parameter, before, ((dim, stay),)))
    return cuts


def _difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((one - two).detach().abs().max()) for one, two in pairs)


def _gradients_differ(a: nn.Module, b: nn.Module) -> float:
    """The largest difference of gradients; infinite where one is missing."""
    largest = 0.0
    for one, two in zip(a.parameters(), b.parameters(), strict=True):
        if one.grad is None or two.grad is None:
            return float("inf")
        largest = max(largest, float((one.grad - two.grad).abs().max()))
    return largest


def _bytes(net: nn.Module) -> bytes:
    return b"".join(p.detach().contiguous().numpy().tobytes() for p in net.parameters())


def main(arguments: list[str]) -> None:
    """Check exchanges on this rank; end the process with code 1 after a broken promise."""
    torch.set_num_threads(1)
    start_torch()
    comm = world()
    for name in arguments or NAMES:
        check_rank(named(name), comm, f"{name} keeps every promise")
    stop_torch()


if __name__ == "__main__":
    main(sys.argv[1:])
