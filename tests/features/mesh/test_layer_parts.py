"""Layers in parts: outputs, gradients and states of the whole layers."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dlio.errors import UsageError
from dlio.features.mesh.layer_parts import LayerParts, TensorSplit, plan_parts
from dlio.train.networks.mlp import Mlp
from dlio.train.networks.transformer import VisionTransformer
from tests.features.mesh.pretend import ThreadCommunicator, on_ranks

WIDE = 256


class Decoder(nn.Module):
    """A layer of a decoder, with masks of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(24, 4, 48, 0.0, "gelu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (words, n, 24) -> the same shape
        words, samples = x.shape[:2]
        causal = torch.triu(torch.ones(words, words, dtype=torch.bool), 1)
        padding = torch.zeros(samples, words, dtype=torch.bool)
        padding[0, -1] = True
        of_heads = torch.zeros(samples * 4, words, words, dtype=x.dtype)
        of_heads[5, 1, 2] = -3.0  # The second head of the second sample.
        made: torch.Tensor = self.layer(
            x, x.flip(0), causal, of_heads, tgt_key_padding_mask=padding, tgt_is_causal=True
        )
        return made


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(24, 6, 48, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def tied() -> nn.Module:
    first, second = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second, nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE))


CASES: list[tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = [
    (lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5)), (3, 6), 2, 3),
    (lambda: nn.Sequential(nn.Linear(6, 8, False), nn.Linear(8, 5, False)), (3, 4, 6), 4, 2),
    (lambda: Mlp(5, inputs=300, width=WIDE, depth=2), (3, 300), 2, 4),
    (tied, (3, WIDE), 2, 2),
    (Decoder, (5, 2, 24), 2, 9),
    (encoder, (2, 5, 24), 3, 12),
    (lambda: VisionTransformer(32, 10, width=48, depth=1), (2, 3, 32, 32), 3, 6),
    (lambda: VisionTransformer(32, 10, width=48, depth=1), (2, 3, 32, 32), 2, 3),
]
"""Model, shape of the input, ranks, and parameters in parts."""


@pytest.mark.parametrize(("make", "shape", "ranks", "count"), CASES)
def test_parts_compute_what_the_whole_does(
    make: Callable[[], nn.Module], shape: tuple[int, ...], ranks: int, count: int
) -> None:
    torch.manual_seed(0)
    whole, inputs = make().double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    wanted = whole(inputs)
    weights = torch.randn_like(wanted)
    gradient = torch.autograd.grad((wanted * weights).sum(), inputs, retain_graph=True)[0]
    (wanted * weights).sum().backward()
    norm = torch.cat([p.grad.reshape(-1) for p in whole.parameters() if p.grad is not None]).norm()
    state = whole.state_dict()

    def run(comm: ThreadCommunicator) -> None:
        parts, model = LayerParts(comm), copy.deepcopy(whole)
        model.zero_grad()
        parts.cut_layers(model)
        assert len(parts.cuts) == count
        here = inputs.detach().clone().requires_grad_()
        made = model(here)
        assert torch.allclose(made, wanted)
        (made * weights).sum().backward()
        assert here.grad is not None
        assert torch.allclose(here.grad, gradient)
        for name, parameter in model.named_parameters():
            other = whole.get_parameter(name)
            assert parameter.grad is not None
            assert other.grad is not None
            assert torch.allclose(parts.whole(name, parameter.grad), other.grad), name
            if name in parts.cuts:
                assert parameter.numel() * ranks == other.numel()
        assert torch.allclose(parts.gradient_norm(model), norm)
        saved = {name: parts.whole(name, value) for name, value in model.state_dict().items()}
        assert saved.keys() == state.keys()
        assert all(torch.equal(saved[name], state[name]) for name in state)
        # The fused forms of torch's layers, which take whole weights, are not used.
        with torch.no_grad():
            assert torch.allclose(model.eval()(here), wanted)

    on_ranks(ranks, run)


def test_stacked_matrices_are_cut_one_by_one() -> None:
    cut, whole = TensorSplit(0, 3), torch.arange(12.0).view(12, 1)
    parts = [cut.part(whole, rank, 2) for rank in range(2)]
    assert parts[1].flatten().tolist() == [2, 3, 6, 7, 10, 11]
    assert torch.equal(cut.join(parts), whole)
    assert not cut.fits(torch.ones(9, 2), 2)
    assert not cut.fits(torch.tensor(1.0), 2)


def test_whole_layers_that_differ_become_the_first_ranks() -> None:
    whole = Mlp(5, inputs=300, width=WIDE, depth=1)

    def run(comm: ThreadCommunicator) -> None:
        parts, model = LayerParts(comm), copy.deepcopy(whole)
        parts.cut_layers(model)
        before = copy.deepcopy(model.state_dict())
        parts.align(model)
        assert len(parts.notes) == 1
        with torch.no_grad():
            model.get_parameter("2.weight").mul_(1 + 0.1 * comm.rank)
        for _ in range(2):
            parts.align(model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        _, note = parts.notes
        assert "computed other weights" in note

    on_ranks(2, run)


def test_layers_that_need_their_whole_outputs_stay_whole() -> None:
    shared = nn.Linear(8, 8)
    dropping = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    normed = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    twice = nn.Sequential(nn.Sequential(shared, nn.Linear(8, 8)), nn.Sequential(shared))
    dropped = nn.TransformerEncoderLayer(8, 2, 8, 0.1)
    odd = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8))
    weighted = nn.MultiheadAttention(8, 2, 0.0)
    for model in (dropping, normed, twice, dropped, odd, weighted, nn.Conv2d(64, 64, 5)):
        with pytest.raises(UsageError, match="no layer that 2 ranks can share"):
            plan_parts(model, 2)
    single = nn.Linear(WIDE, WIDE)
    assert plan_parts(single, 2) == {"": ("gathered", single)}
    with pytest.raises(UsageError, match="multiple of 3"):
        plan_parts(single, 3)
