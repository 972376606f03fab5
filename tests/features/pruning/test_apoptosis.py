"""Networks that `dlio.Apoptosis` prunes while they train, alone and with exchanges."""

import copy
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dlio
from dlio.comm import Request
from dlio.comm.single import SingleCommunicator
from dlio.errors import DlioError, SourceError, UsageError
from dlio.exchange import ExchangeContext, parse_exchange
from dlio.exchange.asgd import Asgd
from dlio.exchange.buckets import trainable
from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.model_size import count_parameters, flops_per_sample, parameters_by_layer
from dlio.features.pruning.model_surgery import apply, shrink_to
from dlio.features.pruning.pruned_file import save_layout
from dlio.features.pruning.pruning_feature import LAYOUT_SUFFIX
from dlio.features.pruning.pruning_pace import Schedule
from dlio.features.pruning.removal_plan import Limits, RemovalPlan
from tests.features.pruning.apoptosis_checks import (
    CHECKS,
    SCHEDULE,
    digest,
    make_net,
    probe,
    samples,
    shapes,
    train,
)
from tests.features.pruning.networks import make

MpiRun = Callable[..., subprocess.CompletedProcess[str]]
BODY = Path(__file__).with_name("apoptosis_checks.py")
EXAMPLE = samples(0, 2)[0]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "checks"),
    [
        (2, ("reduced", "residuals", "layout", "data_parallel", "exchanges")),
        (4, ("reduced", "exchanges")),
    ],
)
@pytest.mark.daily("2-checks0")
def test_ranks_keep_the_promises(mpirun: MpiRun, ranks: int, checks: tuple[str, ...]) -> None:
    done = mpirun(ranks, "-W", "error", str(BODY), *checks)
    assert done.returncode == 0, done.stderr
    for check in checks:
        assert done.stdout.splitlines().count(f"kept {check}") == ranks


@pytest.mark.parametrize("check", CHECKS)
def test_one_process_keeps_the_promises(check: str) -> None:
    CHECKS[check](SingleCommunicator())


def _made(
    net: nn.Module, schedule: Schedule = SCHEDULE, steps: int | None = 60, **options: object
) -> tuple[dlio.Apoptosis, torch.optim.Optimizer]:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    made = dlio.Apoptosis(
        net,
        optimizer,
        example=EXAMPLE,
        probe=probe,
        steps=steps,
        schedule=schedule,
        **options,  # type: ignore[arg-type]
    )
    return made, optimizer


def test_a_round_that_hurts_is_undone_to_the_last_byte() -> None:
    def worse(model: nn.Module) -> float:
        # A smaller model always has a larger loss.
        return 1e9 / count_parameters(model)

    net, alone = make_net(), make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    other = torch.optim.Adam(alone.parameters(), lr=1e-2)
    with dlio.Apoptosis(
        net, optimizer, example=EXAMPLE, probe=worse, steps=60, schedule=SCHEDULE
    ) as apoptosis:
        looks = []

        def each() -> None:
            looks.append({name: t.clone() for name, t in apoptosis.tensors().items()})

        train(net, optimizer, apoptosis, range(48), 0, each)
    train(alone, other, None, range(48), 0)
    assert digest(net) == digest(alone)
    for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    undone = [each for each in apoptosis.rounds if each.undone]
    assert undone
    assert not any(each.removed for each in apoptosis.rounds)
    assert apoptosis.layout.version == 0
    # The window continues with all that was measured.
    counts = [int(seen["2/counts"][1]) for seen in looks]
    assert counts == sorted(set(counts))


def test_harmless_parts_of_a_round_are_applied() -> None:
    """The probe's loss grows only when neurons of one layer are removed."""

    def probing(model: nn.Module) -> float:
        first = model.get_submodule("0")
        assert isinstance(first, nn.Linear)
        return 1.0 + (64 - first.out_features)

    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    with dlio.Apoptosis(
        net,
        optimizer,
        example=EXAMPLE,
        probe=probing,
        steps=60,
        schedule=Schedule(every=1, looks=4, begin=0, tolerance=50.0, allowed=4.0, share=0.5),
        limits=Limits(constant=0.5),
    ) as apoptosis:
        train(net, optimizer, apoptosis, range(30), 0)
    assert net.get_submodule("0").out_features == 64
    assert shapes(net)[2][0] < 48
    assert any(each.undone == ("0",) and set(each.widths) == {"2"} for each in apoptosis.rounds)


def test_a_pruned_run_continues_like_a_small_network_with_the_sliced_state() -> None:
    for kind in (torch.optim.Adam, torch.optim.SGD):
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        net = make_net()
        optimizer = kind(net.parameters(), lr=1e-2, **options)  # type: ignore[arg-type]
        with dlio.Apoptosis(
            net, optimizer, example=EXAMPLE, probe=probe, steps=60, schedule=SCHEDULE
        ) as apoptosis:
            train(net, optimizer, apoptosis, range(48), 0)
        assert apoptosis.layout.version > 1
        small = make_net(5)
        shrink_to(small, apoptosis.layout)
        small.load_state_dict(net.state_dict())
        fresh = kind(small.parameters(), lr=1e-2, **options)  # type: ignore[arg-type]
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(net, optimizer, None, range(48, 60), 0)
        train(small, fresh, None, range(48, 60), 0)
        for a, b in zip(net.parameters(), small.parameters(), strict=True):
            assert float((a - b).detach().abs().max()) < 1e-6


def test_few_steps_are_measured_and_none_after_the_last_round() -> None:
    net = make_net()
    apoptosis, optimizer = _made(net, Schedule(every=4, looks=2, end=0.5, begin=0.0), steps=80)
    with apoptosis:
        train(net, optimizer, apoptosis, range(40), 0)
        looked = apoptosis.overhead()["steps"]
        # Two steps of each window are measured, and none after the last round.
        assert looked in (2, 4, 6, 8, 10)
        train(net, optimizer, apoptosis, range(40, 80), 0)
        assert apoptosis.overhead()["steps"] == looked
        assert 0 < apoptosis.overhead()["share"] < 1
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_a_network_that_overfits_later_is_measured_again() -> None:
    net = make_net()
    schedule = Schedule(every=1, looks=2, begin=0.0, end=0.7, allowed=0.0, patience=64)
    apoptosis, optimizer = _made(net, schedule, steps=100)
    with apoptosis:
        # No neuron may be removed, so rounds become rarer until none is left.
        train(net, optimizer, apoptosis, range(64), 0)
        assert not any(each.removed for each in apoptosis.rounds)
        assert [each.step for each in apoptosis.rounds] == [2, 6, 14, 30, 62]
        assert apoptosis.state_dict()["watching"] is False
        apoptosis.held_out(0.5, training=0.9)
        assert apoptosis.state_dict()["watching"] is True
        assert not apoptosis.due()
        train(net, optimizer, apoptosis, range(64, 68), 0)
        assert apoptosis.rounds[-1].step == 66
        train(net, optimizer, apoptosis, range(68, 100), 0)
        assert apoptosis.state_dict()["watching"] is False
        apoptosis.expect(100)
        assert apoptosis.state_dict()["watching"] is True
        assert not apoptosis.due()


@pytest.mark.parametrize("how", ["clipped", "scaled"])
def test_scores_use_gradients_before_clipping_and_scaling(how: str) -> None:
    prunable = []
    for is_changed in (False, True):
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=how == "scaled")
        with dlio.Apoptosis(
            net, optimizer, example=EXAMPLE, schedule=Schedule(every=1, looks=1000)
        ) as apoptosis:
            for step in range(3):
                inputs, labels = samples(step)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(inputs), labels)
                if how == "scaled" and is_changed:
                    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
                    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                    scaler.step(optimizer)
                else:
                    loss.backward()  # type: ignore[no-untyped-call]
                    if is_changed:
                        apoptosis.look()
                        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
                    optimizer.step()
                apoptosis.step()
                if how == "clipped":
                    # Reset the weights, so that clipping does not make the two runs diverge.
                    net.load_state_dict(make_net(step).state_dict())
            prunable.append(apoptosis.tensors())
    before, after = prunable
    assert before["steps"].tolist() == after["steps"].tolist() == [3, 3]
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-3, atol=1e-9, msg=name)


def test_a_model_that_stores_its_activations_is_pruned() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_net()
            self.kept: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.inner[:2](x)  # type: ignore[index]
            self.kept = [hidden]
            out: torch.Tensor = self.inner[2:](hidden)  # type: ignore[index]
            return out

    net = Keeping()
    net(EXAMPLE)
    apoptosis, optimizer = _made(net)
    with apoptosis:
        for step in range(48):
            inputs, labels = samples(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            net.kept = [value.detach() for value in net.kept]
            apoptosis.step()
            net(inputs)
            net.kept = []
    assert any(each.removed for each in apoptosis.rounds)


def test_settings_that_cannot_work_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net()
    with pytest.raises(UsageError, match="LBFGS"):
        dlio.Apoptosis(net, torch.optim.LBFGS(net.parameters()), example=EXAMPLE)
    apoptosis, optimizer = _made(net)
    with apoptosis:
        for wrong in ((93.0, None), (0.5, 90.0), (-0.1, None)):
            with pytest.raises(UsageError, match="0 to 1"):
                apoptosis.held_out(*wrong)

    class Many(SingleCommunicator):
        size = 4

    monkeypatch.setattr("dlio.features.pruning.apoptosis.world", Many)
    with pytest.raises(UsageError, match=r"4 ranks .* make it after dlio\.distribute"):
        dlio.Apoptosis(net, optimizer, example=EXAMPLE)


def test_without_a_probe_removals_are_within_their_bounds() -> None:
    net = make_net()
    with torch.no_grad():
        net.get_submodule("0").get_parameter("bias")[:8] = -1e3  # Dead for any input.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with dlio.Apoptosis(
        net,
        optimizer,
        example=EXAMPLE,
        schedule=Schedule(every=1, looks=4, share=0.5),
        limits=Limits(loss=0.0, twin=0.0),
    ) as apoptosis:
        train(net, optimizer, apoptosis, range(12), 0)
    assert net.get_submodule("0").out_features == 56
    (done,) = [each for each in apoptosis.rounds if each.removed]
    assert done.removed == {"dead": 8}
    assert done.bounds["dead"] == 0.0
    assert done.widths == {"0": 56}


def test_tensors_outside_the_model_are_cut_with_it() -> None:
    net = make_net()
    average = {name: p.detach().clone() for name, p in net.named_parameters()}

    def on_cut(cuts: list[object]) -> None:
        for cut in cuts:
            average[cut.name] = cut.of(average[cut.name])  # type: ignore[attr-defined]

    apoptosis, optimizer = _made(net, on_cut=[on_cut])
    with apoptosis:
        train(net, optimizer, apoptosis, range(48), 0)
    assert apoptosis.layout.version
    assert {n: a.shape for n, a in average.items()} == {
        n: p.shape for n, p in net.named_parameters()
    }


def test_layers_that_cannot_be_pruned_are_named() -> None:
    single = nn.Linear(12, 4)
    with pytest.raises(UsageError, match="nothing in the model can be pruned"):
        dlio.Apoptosis(single, torch.optim.SGD(single.parameters(), lr=0.1), example=EXAMPLE)
    net = make_net()
    apoptosis, optimizer = _made(net)
    with apoptosis:
        train(net, optimizer, apoptosis, range(48), 0)
        with pytest.raises(DlioError, match="has been pruned"):
            apoptosis.take_layout(apoptosis.layout)


def test_a_pruned_model_is_saved_loaded_and_exported_as_a_plain_small_one(tmp_path: Path) -> None:
    net, inputs = make("residual", "relu", 3)
    groups = find_groups(net, inputs).groups
    keep = {group.name: np.arange(8, dtype=np.int64) for group in groups}
    applied = apply(net, groups, RemovalPlan(keep))
    net.eval()
    path = str(tmp_path / "model.pt")
    torch.save(net.state_dict(), path)
    save_layout(path, applied.layout)
    assert json.loads((tmp_path / "model.pt.layout.json").read_text())["version"] == 1

    loaded = dlio.load_pruned(make("residual", "relu", 4)[0], path).eval()
    assert shapes(loaded) == shapes(net)
    with torch.no_grad():
        assert torch.equal(loaded(inputs), net(inputs))
        exported = torch.export.export(loaded, (inputs,)).module()
        torch.testing.assert_close(exported(inputs), net(inputs))

    (tmp_path / f"model.pt{LAYOUT_SUFFIX}").unlink()
    with pytest.raises(UsageError, match="layout"):
        dlio.load_pruned(make("residual", "relu", 4)[0], path)
    whole = make("residual", "relu", 4)[0]
    torch.save(whole.state_dict(), path)
    assert digest(dlio.load_pruned(make("residual", "relu", 5)[0], path)) == digest(whole)
    (tmp_path / "model.pt").write_bytes(b"no weights")
    with pytest.raises(SourceError, match=r"model\.pt"):
        dlio.load_pruned(whole, path)


def test_parameters_and_flops_are_counted() -> None:
    net = make_net()
    layers = parameters_by_layer(net)
    assert layers == {"0": 12 * 64 + 64, "2": 64 * 48 + 48, "4": 48 * 4 + 4}
    assert sum(layers.values()) == count_parameters(net)
    assert flops_per_sample(net, EXAMPLE) == 2 * (12 * 64 + 64 * 48 + 48 * 4)


class _Message:
    """A message that arrives at once and is written when the receiver asks for it."""

    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return True


class _Never(_Message):
    def done(self) -> bool:
        return False


class _Later(_Message):
    is_there = False

    def done(self) -> bool:
        return self.is_there


class _Mailbox(SingleCommunicator):
    """Two ranks; the other one's messages are put into `mail` by hand."""

    size = 2

    def __init__(self) -> None:
        self.mail: list[tuple[np.ndarray, np.ndarray]] = []
        self._announced: list[np.ndarray] = []
        self.notices: list[list[int]] = []
        self._listening: object = None
        self._early: list[tuple[np.ndarray, _Later]] = []

    def deliver(self, version: int, weights: torch.Tensor) -> None:
        """Put weights of the other rank into the mail."""
        message = weights.numpy().view(np.uint8).copy()
        self.mail.append((np.array([1, version, len(message), time.time_ns()], np.int64), message))

    def irecv(self, into: object, source: int, tag: int) -> Request:
        array = np.asarray(into)
        if tag == 1:
            if not self.mail:
                self._listening = array
                return _Never()
            notice, message = self.mail.pop(0)
            array[:] = notice.view(np.uint8)
            if self._early:
                memory, request = self._early.pop(0)
                memory[: len(message)] = message
                request.is_there = True
            else:
                self._announced.append(message)
            return _Message()
        if not self._announced:
            self._early.append((array, _Later()))
            return self._early[-1][1]
        message = self._announced.pop(0)
        assert len(array) == len(message), "a message is received at its own length"
        array[:] = message
        return _Message()

    def isend(self, data: object, dest: int, tag: int) -> Request:
        if tag == 1:
            self.notices.append(np.asarray(data).view(np.int64).tolist())
        return _Message()


@pytest.mark.parametrize("ahead", [0, 1 << 20])
def test_asgd_drops_messages_of_another_layout(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlio.exchange.asgd._AHEAD_BYTES", ahead)
    net = make_net()
    comm = _Mailbox()
    whole = sum(p.numel() for p in net.parameters())
    for _ in range(2):
        comm.deliver(0, torch.zeros(whole))
    exchange = Asgd(
        trainable(net), ExchangeContext(parse_exchange("asgd"), comm, np.zeros(2, np.int32))
    )
    groups = find_groups(net, EXAMPLE).groups
    keep = {group.name: np.arange(8, dtype=np.int64) for group in groups}
    exchange.before_step()
    apply(net, groups, RemovalPlan(keep), aligned=(exchange.reshape,))
    small = sum(p.numel() for p in net.parameters())
    assert small < whole
    comm.deliver(1, torch.full((small,), 9.0))
    before = digest(net)
    for _ in range(8):
        exchange.after_step()
    record = exchange.statistics()
    assert record["dropped"] == 2
    assert record["accepted"] + record["refused"] == 1
    if not record["accepted"]:
        assert digest(net) == before
    # A notice of this rank names the layout and the length of its weights.
    assert {(version, count) for _, version, count, _ in comm.notices} == {(1, 4 * small)}
