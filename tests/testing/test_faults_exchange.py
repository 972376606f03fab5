"""Exchanges between ranks that are threads keep the contract, and the suite catches each fault."""

from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch
from torch import nn

from dlio.comm import Communicator
from dlio.comm.single import SingleCommunicator
from dlio.exchange import NAMES, Exchange
from dlio.exchange.cut import TensorCut
from dlio.testing import ExchangeTests, promises_of, run_ranks
from dlio.testing.exchange_suite import named
from tests.testing.faults import Fault, assert_caught, assert_complete

RANKS = 3
VARIANTS = ("gossip(flat)", "gossip(gradient)", "hierarchical+bf16", "tree+int8", "local-sgd(2)")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", [*NAMES, *VARIANTS])
@pytest.mark.daily("allreduce", "gossip", "tree", "local-sgd", "parameter-server", "noloco")
def test_exchanges_keep_their_promises(name: str) -> None:
    name = {"local-sgd": "local-sgd(2)", "diloco": "diloco(2)"}.get(name, name)
    for ranks in (1, RANKS):
        for promise in promises_of(ExchangeTests):
            _checked(getattr(named(name), promise), ranks)


def _checked(test: Callable[[Communicator], None], ranks: int) -> None:
    try:
        run_ranks(ranks, test)
    except pytest.skip.Exception:
        return


class Broken:
    """An exchange that passes every call on; faults are put into it."""

    name = "allreduce"

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.model, self.comm = model, comm
        self.inner = named(self.name).make(model, comm)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class _ForgetsEmptyRanks(Broken):
    """Every rank counts the same, however many samples it has."""

    def before_backward(self, samples: int, planned: int) -> None:
        self.inner.weigh(1)


class _WeighsNothing(Broken):
    def weigh(self, samples: float) -> None:
        self.inner.weigh(1)


class _HoldsNothing(Broken):
    def hold(self, held: bool) -> None:
        pass


class _NotQuiteAlike(Broken):
    def after_step(self) -> None:
        self.inner.after_step()
        with torch.no_grad():
            next(self.model.parameters()).add_(1e-7 * self.comm.rank)


class _DoesNothing(Broken):
    """Leaves every rank to itself."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.model, self.comm = model, comm
        self.inner = named(self.name).make(model, SingleCommunicator())


class _LosesTheLastStep(Broken):
    def before_step(self) -> None:
        self.inner.before_step()
        for parameter in self.model.parameters():
            parameter.grad = None


class _NeverFinishes(Broken):
    name = "gossip"

    def finish(self) -> None:
        pass


class _ForgetsToCut(Broken):
    """Cuts the exchange's buckets, and weights of one rank differently."""

    def reshape(self, cuts: Sequence[TensorCut]) -> None:
        self.inner.reshape(cuts)
        with torch.no_grad():
            cuts[0].tensor.add_(self.comm.rank)


class _ForgetsResiduals(Broken):
    name = "allreduce+onebit"

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        pass


class _StateOfNumbers(Broken):
    def state(self) -> dict[str, object]:
        return {"steps": 3}


class _CountsNothing(Broken):
    def statistics(self) -> dict[str, float]:
        return {"wait_s": 0.0, "messages": 0, "bytes": 0}


class _CopiesGradients(Broken):
    def before_step(self) -> None:
        self.inner.before_step()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


class _LeavesAHook(Broken):
    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        super().__init__(model, comm)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient / 2)  # type: ignore[no-untyped-call]


class _ClosesTheCallers(Broken):
    def close(self) -> None:
        self.inner.close()
        self.comm.close()


def _on_ranks(kind: type[Broken], ranks: int = RANKS) -> Callable[[], object]:
    """A suite each of whose tests runs on ranks with a broken exchange."""

    class Tests(ExchangeTests):
        averages_gradients = kind.name == "allreduce"

        def make(self, model: nn.Module, comm: Communicator) -> Exchange:
            return cast(Exchange, kind(model, comm))

        def __getattribute__(self, name: str) -> object:
            test = super().__getattribute__(name)
            if not name.startswith("test_"):
                return test
            return lambda: run_ranks(ranks, test, timeout_s=20)

    Tests.__name__ = kind.__name__
    return Tests


FAULTS = [
    Fault("test_training_on_shares_equals_training_on_the_whole", _on_ranks(_ForgetsEmptyRanks)),
    Fault("test_mean_losses_are_weighed_by_samples", _on_ranks(_WeighsNothing)),
    Fault("test_held_backwards_add_up_to_one_average", _on_ranks(_HoldsNothing)),
    Fault("test_ranks_that_are_alike_have_the_same_bytes", _on_ranks(_NotQuiteAlike)),
    Fault("test_ranks_with_different_samples_stay_together", _on_ranks(_DoesNothing)),
    Fault("test_ranks_without_samples_take_part", _on_ranks(_LosesTheLastStep)),
    Fault("test_weights_rest_after_finish", _on_ranks(_NeverFinishes)),
    Fault("test_it_goes_on_with_a_network_that_was_cut", _on_ranks(_ForgetsToCut)),
    Fault("test_a_restored_exchange_trains_as_the_first_does", _on_ranks(_ForgetsResiduals)),
    Fault("test_a_state_is_made_of_tensors_on_the_host", _on_ranks(_StateOfNumbers)),
    Fault("test_statistics_add_up_seconds_messages_and_bytes", _on_ranks(_CountsNothing)),
    Fault("test_one_rank_neither_copies_nor_communicates", _on_ranks(_CopiesGradients, 1)),
    Fault("test_closing_removes_its_hooks", _on_ranks(_LeavesAHook)),
    Fault("test_the_communicator_that_it_was_given_stays_open", _on_ranks(_ClosesTheCallers)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_catches(fault: Fault) -> None:
    assert_caught(fault)


def test_each_promise_has_a_fault() -> None:
    assert_complete(ExchangeTests, FAULTS)
