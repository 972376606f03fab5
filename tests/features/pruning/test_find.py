"""The search for groups finds all layers that can be pruned, and gives reasons for the rest."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from dlio.cli import main
from dlio.errors import UsageError
from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.neuron_groups import PrunableGroups
from dlio.train.networks.resnet import SmallResNet
from tests.features.pruning.networks import ACTIVATIONS, make


def _reasons(prunable: PrunableGroups) -> dict[str, str]:
    return {one.module: one.reason for one in prunable.left_alone}


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_the_path_from_a_neuron_to_its_readers_is_known(activation: str) -> None:
    for kind, name in (
        ("mlp", "0"),
        ("convolutional", "0"),
        ("branches", "up"),
        ("transformer", "blocks.0.mlp.0"),
    ):
        prunable = find_groups(*make(kind, activation, 0))
        group = next(group for group in prunable.groups if group.name == name)
        assert group.activation is not None
        assert group.activation.kind == activation
        assert group.norm == ("1" if kind == "convolutional" else "")


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_no_activation_is_steeper_than_its_lipschitz_constant(activation: str) -> None:
    group = find_groups(*make("mlp", activation, 0)).groups[0]
    assert group.activation is not None
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    act = ACTIVATIONS[activation]()
    steepest = float((act(x).diff() / x.diff()).abs().max())
    assert 0.98 * group.activation.lipschitz <= steepest <= group.activation.lipschitz + 1e-9
    if group.activation.scales:
        torch.testing.assert_close(act(2.5 * x), 2.5 * act(x))


def test_all_but_the_outputs_of_dlio_trains_models_can_be_pruned() -> None:
    prunable = find_groups(SmallResNet(5, 64, 8), torch.randn(2, 3, 64, 64))
    convolutions = {
        name for name, m in SmallResNet(5, 64, 8).named_modules() if isinstance(m, nn.Conv2d)
    }
    made = [member.module for group in prunable.groups for member in group.producers]
    assert set(made) == convolutions
    assert len(made) == len(convolutions)
    assert _reasons(prunable) == {"head": "no layer reads it: it is the model's output"}
    constants = {m.module: m.constant for group in prunable.groups for m in group.consumers}
    assert constants["head"] == "head.bias"
    assert constants["stages.0.conv2"] == "stages.0.norm2.running_mean"


def test_channels_of_concatenated_and_flattened_outputs_are_distinguished() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 8, 3, padding=1)
            self.b = nn.Conv2d(8, 8, 3, padding=1)
            self.c = nn.Conv2d(16, 8, 1)
            self.head = nn.Linear(8 * 4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = torch.relu(self.a(x))
            c = torch.relu(self.c(torch.cat([a, torch.relu(self.b(a))], 1)))
            out: torch.Tensor = self.head(c.flatten(1))
            return out

    prunable = find_groups(Dense(), torch.randn(2, 3, 2, 2))
    last = {group.name: group.consumers[-1] for group in prunable.groups}
    assert last["a"].channels.tolist() == [[n] for n in range(8)]
    assert last["b"].channels.tolist() == [[8 + n] for n in range(8)]
    assert last["c"].channels.tolist() == [[4 * n + k for k in range(4)] for n in range(8)]


def test_heads_of_attention_are_removed_as_a_whole() -> None:
    prunable = find_groups(*make("transformer", "gelu", 0))
    heads = {g.name: g for g in prunable.groups if "attention" in g.name}
    separate = heads["blocks.0.attention.query"]
    assert (separate.width, separate.unit) == (4, 8)
    assert [m.module.rpartition(".")[2] for m in separate.producers] == ["query", "key", "value"]
    assert separate.attributes == (("blocks.0.attention", "num_heads", 1),)
    fused = heads["blocks.1.attention.qkv"]
    assert (fused.width, fused.unit) == (4, 24)
    assert fused.producers[0].channels[1].tolist() == [
        *range(8, 16), *range(40, 48), *range(72, 80)
    ]  # fmt: skip
    assert fused.attributes == (("blocks.1.attention", "heads", 1),)


class _Odd(nn.Module):
    """A chain of layers of every kind that cannot be pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.before_norm = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.before_rnn = nn.Linear(8, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.summed = nn.Linear(8, 8)
        self.rolled = nn.Linear(8, 8)
        self.scaled = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.softmaxed = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied_too = nn.Linear(8, 8)
        self.tied_too.weight = self.tied.weight
        self.parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.unused = nn.Linear(8, 8)
        self.good = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.before_norm(x))
        x, _ = self.attention(x, x, x)
        x, _ = self.rnn(self.before_rnn(x))
        x = self.summed(x)
        x = self.rolled(x / (1 + x.square().sum(-1, keepdim=True)))
        x = self.scaled(torch.roll(torch.relu(x), 1, -1))
        x = self.softmaxed(torch.relu(x * self.scale))
        x = self.tied_too(torch.relu(self.tied(torch.softmax(x, -1))))
        x = self.parametrised(torch.relu(x))
        x = torch.relu(self.good(torch.relu(x)))
        out: torch.Tensor = self.head(x)
        return out


def test_layers_that_cannot_be_traced_are_kept_and_named() -> None:
    model = _Odd()
    prunable = find_groups(model, torch.randn(3, 5, 8))
    assert [group.name for group in prunable.groups] == ["good"]
    reasons = _reasons(prunable)
    expected = {
        "before_norm": "normalises over several channels",
        "attention": "its heads, its input and its output share one width",
        "before_rnn": "",
        "rnn": "GRU reads its own outputs",
        "summed": "",
        "rolled": "depends on it in other ways",
        "scaled": "",
        "softmaxed": "",
        "tied": "shares a parameter",
        "tied_too": "shares a parameter",
        "parametrised": "",
        "unused": "",
        "head": "it is the model's output",
    }
    assert {
        name: text in reasons.get(name, "-") for name, text in expected.items()
    } == dict.fromkeys(expected, True), reasons


def test_head_counts_outside_of_the_reader_are_found() -> None:
    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_attention_heads = 4
            self.all_head_size = 32
            self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.num_attention_heads
            shape = (*x.shape[:2], heads, self.all_head_size // heads)
            q, k, v = (
                layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
            )
            mixed = torch.softmax(q @ k.transpose(2, 3), -1) @ v
            out: torch.Tensor = mixed.transpose(1, 2).reshape(*x.shape[:2], self.all_head_size)
            return out

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Self()
            self.dense = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.dense(self.inner(x))
            return out

    (group,) = find_groups(Whole(), torch.randn(2, 5, 32)).groups
    assert group.attributes == (
        ("inner", "num_attention_heads", 1),
        ("inner", "all_head_size", 8),
    )


def test_a_model_that_cannot_be_traced_at_all_is_named() -> None:
    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 8)
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(self.head(self.layer(x)).detach().numpy())

    prunable = find_groups(Numbers(), torch.randn(2, 4))
    assert prunable.groups == ()
    assert {"layer", "head"} <= set(_reasons(prunable))


def test_finding_changes_nothing_and_calls_no_hooks() -> None:
    model, inputs = make("residual", "relu", 0)
    calls: list[object] = []

    class Owner:
        """An object that cannot be copied."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def hook(self, *args: Any) -> None:
            calls.append(args)

    owner = Owner()
    model.register_forward_pre_hook(owner.hook)
    model.get_submodule("conv1").register_forward_hook(owner.hook)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    still = model.get_submodule("conv1")
    still.training = False
    modes = [module.training for module in model.modules()]
    random = torch.random.get_rng_state()
    find_groups(model, inputs)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert calls == []
    # torch-pruning 1.6.1 turns training off for all of them when it makes its graph.
    assert [module.training for module in model.modules()] == modes
    assert model.training
    assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())


def test_examples_are_tensors_tuples_or_names() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 8)
            self.b = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> dict[str, torch.Tensor]:
            return {"out": self.b(torch.relu(self.a(x)) + shift)}

    for example in ((torch.randn(3, 4),), {"x": torch.randn(3, 4), "shift": 1.0}):
        assert [group.name for group in find_groups(Two(), example).groups] == ["a"]


def test_without_torch_pruning_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(UsageError, match="pip install 'torch-pruning"):
        find_groups(*make("mlp", "relu", 0))


def test_a_missing_package_is_said_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dlio.features.pruning.pruning_feature.find_spec", lambda name: None)
    monkeypatch.setattr("dlio.cli.train_command.on_ranks", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(SystemExit) as ended:
        main(["train", "data", "-n", "2", "--prune", "apoptosis"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--prune apoptosis finds layers" in said
    assert "pip install" in said
