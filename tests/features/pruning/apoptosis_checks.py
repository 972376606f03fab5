"""Checks of pruning on any number of ranks: `mpirun ... apoptosis_checks.py CHECK`."""

import hashlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import dlio
from dlio.comm import Communicator, world
from dlio.exchange.step_watch import StepWatch
from dlio.features.pruning.apoptosis import ApoptosisState
from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.input_statistics import Collector
from dlio.features.pruning.model_surgery import PrunedLayout, apply, shrink_to
from dlio.features.pruning.neuron_groups import Indices
from dlio.features.pruning.plan_trials import reduced
from dlio.features.pruning.pruning_pace import Schedule
from dlio.features.pruning.removal_plan import RemovalPlan
from tests.exchange.training import started

STEPS: Final = 30
SCHEDULE: Final = Schedule(
    every=2,
    looks=4,
    begin=0.0,
    end=0.8,
    tolerance=5.0,
    allowed=16.0,
    part=0.125,
    share=0.125,
)


def make_net(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 4)
    )


def samples(seed: int, count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 12, generator=generator)
    teacher = torch.randn(12, 4, generator=torch.Generator().manual_seed(7))
    return inputs, (inputs @ teacher).argmax(1)


def probe(model: nn.Module) -> torch.Tensor:
    inputs, labels = samples(99_999, 256)
    return nn.functional.cross_entropy(model(inputs), labels)


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    apoptosis: "dlio.Apoptosis | None",
    steps: range,
    rank: int,
    each: Callable[[], None] | None = None,
) -> None:
    for step in steps:
        inputs, labels = samples(1000 * rank + step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if apoptosis is not None and apoptosis.step() is not None and each is not None:
            each()


def shapes(net: nn.Module) -> list[list[int]]:
    return [list(p.shape) for p in net.parameters()]


def digest(net: nn.Module) -> str:
    digested = hashlib.sha256()
    for tensor in net.state_dict().values():
        digested.update(tensor.contiguous().numpy().tobytes())
    return digested.hexdigest()


def check_exchanges(comm: Communicator) -> None:
    """After each round all ranks have equal shapes, and messages get shorter.

    With exchanges of gradients the ranks hold identical bytes. Training continues.
    """
    names = ("allreduce", "gossip", "asgd", "allreduce+adaptive", "gossip+int8", "asgd+bf16")
    for name in (*names, "tree+int8", "local-sgd(3)", "diloco(2)+int8", "gossip(gradient)"):
        net = make_net(comm.rank + 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        nodes = max(1, comm.size // 2)
        with dlio.distribute(net, optimizer, name, seed=3, pretend_nodes=nodes) as ranks:
            apoptosis = dlio.Apoptosis(
                net,
                optimizer,
                example=samples(0, 2)[0],
                probe=probe,
                steps=STEPS,
                schedule=SCHEDULE,
            )
            rounds: list[object] = []

            def each(net: nn.Module = net, rounds: list[object] = rounds) -> None:
                rounds.append(shapes(net))

            with apoptosis:
                train(net, optimizer, apoptosis, range(STEPS), comm.rank, each)
            assert rounds, name
            everyone = comm.allgather(rounds)
            assert all(other == rounds for other in everyone), name
            assert shapes(net) != shapes(make_net()), f"{name}: {apoptosis.rounds}"
            assert all(p.isfinite().all() for p in net.parameters()), name
            versions = comm.allgather(apoptosis.layout.to_json())
            assert all(other == versions[0] for other in versions)
            ranks.finish()
            if ranks.alike or name.startswith(("local", "diloco")):
                assert len(set(comm.allgather(digest(net)))) == 1, name
            record = ranks.statistics()["bytes"]
            train(net, optimizer, None, range(4), comm.rank)
            small = ranks.statistics()["bytes"] - record
            if comm.size > 1 and name == "allreduce":
                # With them travel a flag for each parameter, the weight, and facts of the step.
                size = sum(p.numel() + 1 for p in net.parameters()) + 1 + StepWatch.count
                assert small == 4 * 4 * size * 2 * (comm.size - 1) / comm.size
        # DiLoCo at every second step overshoots, also without pruning.
        loss = float(probe(net).detach())
        assert loss < 0.9 or name.startswith("diloco"), f"{name}: {loss}"


def check_residuals(comm: Communicator) -> None:
    """Residuals of compressed exchanges are cut with the parameters.

    For the remaining neurons, delivered sums and residuals add up to all gradients.
    """
    for name in ("allreduce+adaptive", "tree+onebit", "allreduce+int8", "gossip+adaptive"):
        net = make_net()
        groups = find_groups(net, samples(0, 2)[0]).groups
        exchange = started(name, net, comm, seed=0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(5):
            inputs, labels = samples(1000 * comm.rank + step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()  # type: ignore[no-untyped-call]
            exchange.before_step()
            optimizer.step()
            exchange.after_step()
        exchange.finish()
        named = list(net.named_parameters())
        owed = {key: each.clone() for key, each in exchange.state().items() if "owed" in key}
        assert comm.size == 1 or any(each.any() for each in owed.values()), name
        keep: dict[str, Indices] = {group.name: np.arange(0, group.width, 2) for group in groups}
        before = _by_parameter(owed, named)
        cuts = apply(net, groups, RemovalPlan(keep), [optimizer], aligned=(exchange.reshape,)).cuts
        after = _by_parameter(
            {key: each for key, each in exchange.state().items() if "owed" in key}, named
        )
        cut_of = {cut.name: cut for cut in cuts}
        for parameter_name, value in before.items():
            cut = cut_of.get(parameter_name)
            expected = value if cut is None else cut.of(value)
            assert torch.equal(after[parameter_name], expected), f"{name}: {parameter_name}"
        assert before.keys() == after.keys()
        exchange.close()


def _by_parameter(
    owed: dict[str, torch.Tensor], named: list[tuple[str, nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """Split a flat array into parameters: one bucket holds them all, the last parameter first."""
    if not owed:
        return {}
    (flat,) = owed.values()
    parts, at = {}, 0
    for name, parameter in reversed(named):
        count = parameter.numel()
        parts[name] = flat[at : at + count].view(parameter.shape).clone()
        at += count
    assert at == len(flat)
    return parts


def check_reduced(comm: Communicator) -> None:
    """Statistics reduced over ranks equal those merged in one place."""
    net = make_net()
    groups = find_groups(net, samples(0, 2)[0]).groups

    def seen(rank: int) -> Collector:
        with Collector(net, groups, every=1) as collector:
            for step in range(3):
                inputs, labels = samples(1000 * rank + step)
                nn.functional.cross_entropy(net(inputs), labels).backward()  # type: ignore[no-untyped-call]
                collector.step()
        return collector

    mine = reduced(seen(comm.rank).statistics(), comm)
    all_seen = []
    for rank in range(comm.size):
        net.zero_grad()
        all_seen.append(seen(rank).statistics())
    sums = np.sum([each.sums() for each in all_seen], axis=0)
    together = all_seen[0].reduced(sums, np.max([each.peaks() for each in all_seen], axis=0))
    for name, moments in together.moments.items():
        for row in ("total", "squares", "zeros", "score", "high", "low"):
            a, b = getattr(moments, row), getattr(mine.moments[name], row)
            assert np.allclose(a, b), f"{name}.{row}"
        assert moments.count == mine.moments[name].count == 3 * 64 * comm.size
        assert moments.steps == mine.moments[name].steps == 3 * comm.size
    peaks = np.array([float(comm.rank), -float(comm.rank), -np.inf])
    comm.wait([comm.iallreduce(peaks, "max")], "peaks")
    assert peaks.tolist() == [comm.size - 1, 0, -np.inf]
    assert comm.tell([f"{comm.rank} ü"]) == ["0 ü"]


def check_layout(comm: Communicator) -> None:
    """A run resumed just before and just after a round equals the uninterrupted run."""
    whole, _, _ = _run(comm, range(40))
    state, start = None, 0
    for stop in (15, 16, 17, 40):
        again, *state = _run(comm, range(start, stop), *(state or ()))
        start = stop
    assert digest(whole) == digest(again)
    assert shapes(whole) != shapes(make_net())


def check_data_parallel(comm: Communicator) -> None:
    """A model in torch's DDP is pruned to the same bytes as one that dlio distributes."""
    dlio.init_process_group()

    def trained(options: dict[str, Any] | None, hook: Any = None) -> tuple[str, list[int]]:
        """Without options by dlio."""
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        with ExitStack() as stack:
            if options is None:
                called: nn.Module = net
                stack.enter_context(dlio.distribute(net, optimizer))
            else:
                called = ddp = DistributedDataParallel(net, **options)
                if hook is not None:
                    ddp.register_comm_hook(None, hook)
            apoptosis = stack.enter_context(
                dlio.Apoptosis(
                    called,
                    optimizer,
                    example=samples(0, 2)[0],
                    probe=probe,
                    steps=STEPS,
                    schedule=SCHEDULE,
                )
            )
            train(called, optimizer, apoptosis, range(STEPS), comm.rank)
            if hook is not None:
                assert [each for each, _ in ddp._comm_hooks] == [hook]
        assert len(set(comm.allgather(digest(net)))) == 1
        assert shapes(net) != shapes(make_net())
        return digest(net), [each.parameters for each in apoptosis.rounds]

    expected = trained(None)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
        {"find_unused_parameters": True, "init_sync": False},
    )
    for options in kinds:
        assert trained(options) == expected, options
    assert trained({}, fp16_compress_hook)[0] != expected[0]
    dist.destroy_process_group()


def _run(
    comm: Communicator,
    steps: range,
    saved: "tuple[ApoptosisState, dict[str, torch.Tensor]] | None" = None,
    weights: "tuple[dict[str, torch.Tensor], dict[str, object]] | None" = None,
) -> tuple[
    nn.Module,
    tuple[ApoptosisState, dict[str, torch.Tensor]],
    tuple[dict[str, torch.Tensor], dict[str, object]],
]:
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    with dlio.distribute(net, optimizer, "allreduce") as ranks:
        apoptosis = dlio.Apoptosis(
            net,
            optimizer,
            example=samples(0, 2)[0],
            probe=probe,
            steps=40,
            schedule=SCHEDULE,
            exchange=ranks,
        )
        with apoptosis:
            if saved is not None and weights is not None:
                state, window = saved
                apoptosis.take_layout(PrunedLayout.from_json(state["layout"]))
                net.load_state_dict(weights[0])
                optimizer.load_state_dict(weights[1])
                apoptosis.load_state_dict(state, window)
            train(net, optimizer, apoptosis, steps, comm.rank)
            state = apoptosis.state_dict()
            window = {name: each.clone() for name, each in apoptosis.tensors().items()}
    plain = {name: each.clone() for name, each in net.state_dict().items()}
    small = make_net()
    shrink_to(small, apoptosis.layout)
    small.load_state_dict(plain)
    return net, (state, window), (plain, optimizer.state_dict())


CHECKS: Final[dict[str, Callable[[Communicator], None]]] = {
    "exchanges": check_exchanges,
    "residuals": check_residuals,
    "reduced": check_reduced,
    "layout": check_layout,
    "data_parallel": check_data_parallel,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for asked in sys.argv[1:]:
        CHECKS[asked](world())
        print(f"kept {asked}", flush=True)
