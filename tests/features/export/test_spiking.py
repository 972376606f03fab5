"""NIR graphs answer as the network that they were made from."""

import importlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dlio.errors import UsageError
from dlio.features.export import nir_graph
from dlio.features.export.check_pictures import LabelledPictures
from dlio.features.export.export_options import ExportOptions
from dlio.features.export.layer_graph import LayerGraph, trace_network
from dlio.features.export.model_export import export_model
from dlio.features.export.nir_graph import activation_scales, simulate, spiking_graph
from dlio.features.export.ternary import Ternary, ternarise, ternary_network, tune_ternary
from dlio.train.model import make_model, normalised
from dlio.train.networks.resnet import ResidualBlock
from tests.features.export.conftest import MODEL, SIZE, Trained

nir = pytest.importorskip("nir")
pytest.importorskip("nirtorch")
snntorch: Any = None
with suppress(ImportError):
    snntorch = importlib.import_module("snntorch")


class _Block(nn.Module):
    """A residual network whose shortcut is the identity, with all layers that a graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, "valid"), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(3, 2, 1)
        )
        self.block = ResidualBlock(6, 6, 1)
        # Names that the graph has for itself.
        self.input, self.output, self.normalise = nn.ReLU(), nn.Linear(4, 4), nn.ReLU()
        self.rest = nn.Sequential(
            nn.Conv2d(6, 8, (1, 3), padding="same", dilation=2, groups=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(12, 4, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.normalise(self.input(self.block(self.stem(x))))
        logits: torch.Tensor = self.output(self.rest(features))
        return logits


def _blurred(module: nn.Module) -> nn.Module:
    """Give a network random statistics and weights, so that no layer is the identity."""
    generator = torch.Generator().manual_seed(1)
    for name, value in module.state_dict().items():
        if value.is_floating_point() and ("norm" in name or value.ndim == 1):
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return module.eval()


def _pictures(count: int = 8, size: int = SIZE) -> LabelledPictures:
    generator = torch.Generator().manual_seed(2)
    small = torch.randint(0, 256, (count, 3, 4, 4), generator=generator).float()
    images = nn.functional.interpolate(small, size, mode="bilinear").byte()
    return LabelledPictures(images, torch.arange(count) % 4, ())


def _expected(module: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = module(normalised(images, torch.device("cpu")))
    return logits


@pytest.mark.parametrize("make", [_Block, lambda: make_model(MODEL, 4, SIZE)])
def test_a_traced_network_computes_as_its_module(make: Any) -> None:
    module = _blurred(make())
    network = trace_network(module, SIZE)
    images = _pictures().images
    expected = _expected(module, images)
    assert expected.std() > 0.01
    assert torch.allclose(network.logits(images.float() / 255), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_ternary", [False, True])
def test_spike_rates_approach_activations(is_ternary: bool) -> None:
    module, shown = _blurred(_Block()), _pictures(4)
    network: LayerGraph = trace_network(module, SIZE)
    ternary: dict[str, Ternary] = {}
    if is_ternary:
        network, ternary = ternary_network(network)
    graph = spiking_graph(network, activation_scales(network, shown, 100), ternary)
    simulated = simulate(graph, shown.images, [8, 64, 512])
    expected = network.logits(shown.images.float() / 255)
    span = float(expected.max() - expected.min())
    errors = [float((each - expected).abs().max()) / span for each in simulated.logits.values()]
    assert errors[-1] < 0.02
    assert errors[-1] < errors[0] / 4


def test_a_neuron_spikes_in_proportion_to_its_input() -> None:
    one = np.ones(1, np.float32)
    graph = nir.NIRGraph(
        {
            "input": nir.Input({"input": np.array([1])}),
            "neuron": nir.IF(one, one, np.zeros_like(one)),
            "output": nir.Output({"output": np.array([1])}),
        },
        [("input", "neuron"), ("neuron", "output")],
    )
    images = torch.tensor([[0], [51], [102], [255]], dtype=torch.uint8)
    rates = simulate(graph, images, [1000]).logits[1000].flatten()
    assert torch.allclose(rates, torch.tensor([0.0, 0.2, 0.4, 1.0]), atol=2e-3)
    # 0.4 passes 1 at the third step, and 1.0 at the second: the surplus is lost.
    rates = simulate(graph, images, [1000], "zero").logits[1000].flatten()
    assert torch.allclose(rates, torch.tensor([0.0, 1 / 6, 1 / 3, 0.5]), atol=2e-2)


def test_a_graph_is_written_simulated_and_measured(trained: Trained, tmp_path: Path) -> None:
    lines: list[str] = []
    options = trained.options(
        tmp_path / "model.nir",
        calibrate=str(trained.train),
        steps=64,
        report=str(tmp_path / "report.json"),
    )
    export_model(ExportOptions(**options), lines.append)  # type: ignore[arg-type]
    graph = nir.read(tmp_path / "model.nir")
    kinds = {type(node).__name__ for node in graph.nodes.values()}
    assert kinds == {"Input", "Conv2d", "IF", "AvgPool2d", "Flatten", "Affine", "Output"}
    report = json.loads((tmp_path / "report.json").read_text())
    spiking = report["accuracy_spiking"]
    assert list(spiking) == ["8", "16", "32", "64"]
    assert report["accuracy_model"] > 0.95
    assert spiking["64"] >= report["accuracy_model"] - 0.05
    assert any("spiking after 64 steps" in line for line in lines)
    assert report["neurons"] > 1000
    # Another program's reading of the graph: only its interpretation of nodes is ours.
    logits = simulate(graph, trained.held_out.images, [64]).logits[64]
    assert trained.held_out.accuracy(logits) == pytest.approx(spiking["64"])


class _LeakyOfSnntorch(nn.Module):
    """snntorch's neuron without a leak; its own import of NIR gives IF nodes a leak of 0.1."""

    def __init__(self, node: Any) -> None:
        super().__init__()
        assert (node.r == 1).all()
        self.threshold = torch.from_numpy(node.v_threshold)
        self.neuron = snntorch.Leaky(1.0, 1.0, reset_mechanism="subtract", reset_delay=False)
        self.spikes = 0.0

    def forward(
        self, x: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spikes, potential = self.neuron(x, torch.zeros_like(x) if state is None else state)
        self.spikes += float(spikes.sum())
        return spikes, potential


@pytest.mark.skipif(snntorch is None, reason="snntorch is not installed")
def test_neurons_of_snntorch_give_the_same_answers(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = trace_network(trained.module, SIZE)
    graph = spiking_graph(network, activation_scales(network, trained.held_out, 99.9), {})
    ours = simulate(graph, trained.held_out.images, [32])
    monkeypatch.setattr(nir_graph, "_IntegrateAndFire", _LeakyOfSnntorch)
    theirs = simulate(graph, trained.held_out.images, [32])
    # A neuron that should spike more than once a step loses a spike there.
    assert theirs.spikes == pytest.approx(ours.spikes, rel=0.02)
    span = float(ours.logits[32].max() - ours.logits[32].min())
    assert float((theirs.logits[32] - ours.logits[32]).abs().max()) < 0.05 * span
    assert trained.held_out.accuracy(theirs.logits[32]) > 0.9


def test_weights_of_a_ternary_graph_are_signs(trained: Trained, tmp_path: Path) -> None:
    options = trained.options(
        tmp_path / "model.nir",
        calibrate=str(trained.train),
        ternary=True,
        tune_epochs=10,
        steps=64,
        report=str(tmp_path / "report.json"),
    )
    export_model(ExportOptions(**options))  # type: ignore[arg-type]
    graph = nir.read(tmp_path / "model.nir")
    learned = {name: node for name, node in graph.nodes.items() if f"{name}_scale" in graph.nodes}
    assert len(learned) == 11
    for name, node in learned.items():
        assert set(np.unique(node.weight)) <= {-1, 0, 1}, name
        assert (graph.nodes[f"{name}_scale"].scale > 0).all()
    report = json.loads((tmp_path / "report.json").read_text())
    assert 0.2 < report["nonzero"] < 0.9
    assert report["accuracy_ternary"] > 0.9
    assert report["accuracy_spiking"]["64"] >= report["accuracy_ternary"] - 0.1


@pytest.mark.parametrize("seed", range(5))
def test_ternary_weights_are_the_nearest(seed: int) -> None:
    weight = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed))
    weight[2] = 0
    rounded = ternarise(weight)
    errors = (weight - rounded.weight).square().sum(1)
    for threshold in weight.abs().flatten():
        kept = weight.abs() >= threshold
        mean = (weight.abs() * kept).sum(1) / kept.sum(1).clamp(min=1)
        other = (weight - weight.sign() * kept * mean.view(-1, 1)).square().sum(1)
        assert (errors <= other + 1e-6).all()
    assert (rounded.scale > 0).all()
    assert not rounded.signs[2].any()


def test_tuning_lowers_the_loss_of_ternary_weights(trained: Trained) -> None:
    network = trace_network(trained.module, SIZE)
    data = trained.held_out

    def loss(which: LayerGraph) -> float:
        logits = ternary_network(which)[0].logits(data.images.float() / 255)
        return float(nn.functional.cross_entropy(logits, data.labels))

    tuned = tune_ternary(network, data, 4, lambda _: None)
    assert loss(tuned) < loss(network)


class _Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + x).mean((2, 3))


class _Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3))


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([nn.Conv2d(3, 4, 3), nn.Tanh()], r"1: .* no Tanh: train with nn.ReLU"),
        ([nn.MaxPool2d(2)], r"0: .* no MaxPool2d: train with average pooling"),
        ([nn.BatchNorm2d(3)], "no BatchNorm2d that no convolution stands before"),
        ([nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")], "padding_mode=reflect"),
        ([nn.AvgPool2d(3, 2, ceil_mode=True)], "ceil_mode"),
        ([nn.Conv2d(3, 4, (2, 3))], "make it square"),
        ([nn.Linear(SIZE, 2)], "Linear on 3 dimensions"),
        ([nn.GroupNorm(1, 3)], "no GroupNorm: a NIR graph has convolutions"),
        ([_Twice()], "added to itself"),
        ([_Branching()], "cannot be traced"),
    ],
)
def test_layers_without_a_spiking_form_are_refused_by_name(
    layers: list[nn.Module], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        trace_network(nn.Sequential(*layers).eval(), SIZE)
