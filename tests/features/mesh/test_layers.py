"""Layers of tensors that ranks share, for any sizes: outputs and gradients of the whole tensor."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from dlio.errors import UsageError
from dlio.features.mesh.rank_mesh import Mesh
from dlio.features.mesh.split_tensor import gather
from tests.conftest import examples
from tests.features.mesh.pretend import ThreadCommunicator, on_ranks

RANKS = st.integers(2, 4)
EXTENTS = st.integers(4, 40)


def agrees(layer: nn.Module, extent: int, ranks: int, channels: int = 2) -> None:
    """Assert that ranks compute what one process does, or that all of them refuse."""
    layer = layer.double()
    whole = torch.randn(2, channels, extent, 5, dtype=torch.float64, requires_grad=True)
    assume(extent >= ranks)
    try:
        wanted = layer(whole)
    except RuntimeError:
        assume(False)  # The kernel is larger than the padded input.
    assume(wanted.shape[2] >= ranks)
    weights = torch.randn(wanted.shape, dtype=torch.float64)
    (wanted * weights).sum().backward()
    assert whole.grad is not None

    def run(comm: ThreadCommunicator) -> tuple[torch.Tensor, ...] | None:
        mesh = Mesh({"space": ranks}, comm=comm)
        slab = mesh.slab(extent, -2)
        local = whole.detach()[:, :, slice(*slab.own)].clone().requires_grad_()
        try:
            out = gather(layer(mesh.split(local, slab)))
        except UsageError as error:
            if "padding alone" not in str(error):
                raise
            return None
        # Each rank has the whole, so each counts for its share.
        loss = (out * weights).sum() / ranks
        gradients = torch.autograd.grad(loss, [local, *layer.parameters()])
        return out.detach(), *gradients

    results = on_ranks(ranks, run)
    if any(each is None for each in results):
        assert all(each is None for each in results)
        return
    kept = [each for each in results if each is not None]
    for out, *_ in kept:
        assert torch.allclose(out, wanted)
    assert torch.allclose(torch.cat([each[1] for each in kept], 2), whole.grad)
    for number, parameter in enumerate(layer.parameters()):
        assert parameter.grad is not None
        total = sum(each[2 + number] for each in kept)
        assert torch.allclose(torch.as_tensor(total), parameter.grad)


@settings(max_examples=examples(60))
@given(
    ranks=RANKS,
    extent=EXTENTS,
    kernel=st.integers(1, 6),
    stride=st.integers(1, 4),
    padding=st.integers(0, 4),
    dilation=st.integers(1, 3),
)
def test_convolutions(
    ranks: int, extent: int, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    sizes = (kernel, 3), (stride, 1), (padding, 1), (dilation, 1)
    agrees(nn.Conv2d(2, 3, *sizes), extent, ranks)


@settings(max_examples=examples(60))
@given(
    ranks=RANKS,
    extent=EXTENTS,
    kernel=st.integers(1, 6),
    stride=st.integers(1, 4),
    padding=st.integers(0, 3),
    more=st.integers(0, 2),
    dilation=st.integers(1, 3),
)
def test_transposed_convolutions(
    ranks: int, extent: int, kernel: int, stride: int, padding: int, more: int, dilation: int
) -> None:
    assume(more < max(stride, dilation))
    layer = nn.ConvTranspose2d(
        2, 3, (kernel, 3), (stride, 1), (padding, 1), (more, 0), 1, True, (dilation, 1)
    )
    agrees(layer, extent, ranks)


@settings(max_examples=examples(60))
@given(
    ranks=RANKS,
    extent=EXTENTS,
    kernel=st.integers(1, 6),
    stride=st.integers(1, 5),
    padding=st.integers(0, 3),
    kind=st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]),
)
def test_pooling(
    ranks: int, extent: int, kernel: int, stride: int, padding: int, kind: Callable[..., nn.Module]
) -> None:
    assume(2 * padding <= kernel)
    agrees(kind((kernel, 2), (stride, 1), (padding, 0)), extent, ranks)


@settings(max_examples=examples(40))
@given(RANKS, EXTENTS, st.integers(1, 4), st.sampled_from(["nearest", "nearest-exact", "bilinear"]))
def test_up_sampling(ranks: int, extent: int, factor: int, mode: str) -> None:
    agrees(nn.Upsample(scale_factor=(factor, 1), mode=mode), extent, ranks)


def test_samples_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    for number in range(2):
        np.save(tmp_path / f"{number}.npy", np.zeros((9, 3, 3), np.float32))
    np.save(tmp_path / "labels.npy", np.zeros((4, 6), np.float32))

    def run(comm: ThreadCommunicator) -> None:
        mesh = Mesh({"space": 2}, comm=comm)
        with pytest.raises(UsageError, match="is not a multiple"):
            mesh.open(f"{tmp_path}/[01].npy", samples="files")
        with pytest.raises(UsageError, match="names 'mask'"):
            mesh.open(str(tmp_path / "labels.npy"), fields=["mask"])
        data, slab = mesh.open(str(tmp_path / "labels.npy"), fields=[])
        assert data[0]["data"].shape == (6,)
        assert slab.own == (3 * comm.rank, 3 * comm.rank + 3)
        data.close()

    on_ranks(2, run)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mesh_of_all_ranks_averages_as_one_process(ranks: int) -> None:
    """Batch normalisation in training, and its running statistics."""
    layer, one = nn.BatchNorm2d(2, momentum=0.3), nn.BatchNorm2d(2, momentum=0.3)
    whole = torch.randn(3, 2, 11, 5) * 4 + 3
    wanted = one(whole)

    def run(comm: ThreadCommunicator) -> torch.Tensor:
        mesh = Mesh({"space": ranks}, comm=comm)
        slab = mesh.slab(11, -2)
        own = nn.BatchNorm2d(2, momentum=0.3)
        own.load_state_dict(layer.state_dict())
        out = gather(own(mesh.split(whole[:, :, slice(*slab.own)].clone(), slab)))
        for mine, its in zip(own.buffers(), one.buffers(), strict=True):
            assert torch.allclose(mine, its, atol=1e-6)
        return out.detach()

    for out in on_ranks(ranks, run):
        assert torch.allclose(out, wanted, atol=1e-5)
