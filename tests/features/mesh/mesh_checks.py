"""Checks of tensors that ranks share, on any number of ranks."""

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.nn import functional

import dlio
from dlio.comm import Communicator, world
from dlio.errors import CommTimeout, UsageError
from dlio.features.mesh.rank_mesh import Mesh
from dlio.features.mesh.split_tensor import gather, local_part
from tests.features.mesh.nets import CosmoFlow, Pictures, UNet

STEPS = 8
Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
Turn = tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]


def mesh_of(comm: Communicator) -> Mesh:
    """Two axes where there are ranks for them."""
    return Mesh("data=2,space=2" if comm.size == 4 else f"space={comm.size}")


def cut(whole: torch.Tensor, mesh: Mesh, dimension: int) -> torch.Tensor:
    """Return this rank's samples, and of these its part, as a tensor that ranks share."""
    data = mesh.along("data")
    return mesh.cut(whole.chunk(data.size)[data.rank], dimension)


def away_from_first(net: nn.Module, one: nn.Module) -> float:
    """Return the largest difference of this rank's `net` from rank 0's `one`."""
    wanted, mine = (
        torch.cat([value.double().flatten() for value in each.state_dict().values()]).numpy()
        for each in (one, net)
    )
    world().bcast(wanted, root=0)
    return float(np.abs(mine - wanted).max())


def trains_as_one(
    mesh: Mesh,
    make: Callable[[], nn.Module],
    draw: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]],
    loss_of: Callable[..., torch.Tensor],
    split_target: bool,
    dimension: int,
) -> float:
    """Return the largest difference of any weight from those of one process, over all steps.

    Rank 0 is that process, too: the others would compute the same.
    """
    torch.manual_seed(7)
    one = make()
    torch.manual_seed(mesh.rank)  # `distribute` makes the ranks' models alike.
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    reference = torch.optim.SGD(one.parameters(), lr=0.02, momentum=0.9)
    if mesh.rank == 0:
        net.load_state_dict(one.state_dict())
    generator = torch.Generator().manual_seed(11)
    data = mesh.along("data")
    worst = 0.0
    with mesh.distribute(net, optimizer):
        for number in range(STEPS):
            inputs, targets = draw(generator)
            if number % 5 == 4:  # Ranks along `data` have 2 samples and 1.
                inputs, targets = inputs[:3], targets[:3]
            mine = targets.chunk(data.size)[data.rank]
            if split_target:
                # Labels lack the channels: the dimension is the same, counted from the last.
                mine = cut(targets, mesh, dimension)
            loss = mesh.weigh(loss_of(net(cut(inputs, mesh, dimension)), mine), len(mine))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if mesh.rank == 0:
                expected = loss_of(one(inputs), targets)
                reference.zero_grad()
                expected.backward()  # type: ignore[no-untyped-call]
                reference.step()
            worst = float(np.maximum(worst, away_from_first(net, one)))
    return worst


def volumes(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(4, 1, 20, 8, 8, generator=generator)
    inputs += torch.arange(4.0).view(-1, 1, 1, 1, 1)  # Samples differ in mean, as for batch norm.
    labels = torch.randint(0, 3, (4, 20, 8, 8), generator=generator)
    labels[:, :3] = -100  # Ranks count different numbers of elements.
    return inputs, labels


def check_unet(comm: Communicator) -> None:
    """A 3-D U-Net with batch normalisation; the lowest level has 5 planes."""
    with mesh_of(comm) as mesh:
        worst = trains_as_one(mesh, UNet, volumes, functional.cross_entropy, True, -3)
        assert worst < 1e-5, worst
        assert mesh.statistics()["bytes"] > 0
        print(f"unet differs by {worst:.1e}", file=sys.stderr)


def saved_bytes(run: Callable[[], object]) -> int:
    """Return the bytes that a forward pass keeps for its backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())


def check_memory(comm: Communicator) -> None:
    """A rank keeps its share of the activations, and its halos."""
    with Mesh({"space": comm.size}) as mesh:
        net = UNet()
        inputs, labels = torch.randn(1, 1, 64, 16, 16), torch.zeros(1, 64, 16, 16).long()
        whole = saved_bytes(lambda: functional.cross_entropy(net(inputs), labels))
        x, y = cut(inputs, mesh, -3), cut(labels, mesh, -3)
        mine = saved_bytes(lambda: functional.cross_entropy(net(x), y))
        assert mine < 1.3 * whole / comm.size, (mine, whole)


def check_groups(comm: Communicator) -> None:
    """A 3-D U-Net with group normalisation, all ranks along space."""
    with Mesh({"space": comm.size}) as mesh:
        worst = trains_as_one(
            mesh, lambda: UNet(nn.GroupNorm), volumes, functional.cross_entropy, True, -3
        )
        assert worst < 1e-5, worst


def check_cosmoflow(comm: Communicator) -> None:
    """Convolutions, then dense layers on the gathered volume; another dimension."""

    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(4, 2, 16, 16, 16, generator=generator)
        return inputs, torch.randn(4, 4, generator=generator)

    with mesh_of(comm) as mesh:
        worst = trains_as_one(mesh, lambda: CosmoFlow(16), draw, functional.mse_loss, False, -2)
        assert worst < 1e-5, worst
        print(f"cosmoflow differs by {worst:.1e}", file=sys.stderr)


def check_pictures(comm: Communicator) -> None:
    """Pictures whose height no number of ranks divides."""

    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(4, 3, 37, 24, generator=generator)
        return inputs, torch.randint(0, 5, (4,), generator=generator)

    with mesh_of(comm) as mesh:
        worst = trains_as_one(mesh, Pictures, draw, functional.cross_entropy, False, -2)
        assert worst < 1e-5, worst


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(2, 3, 4, stride=3, padding=2), (2, 2, 31)),
    "conv2d": (lambda: nn.Conv2d(2, 4, (5, 3), (2, 1), (0, 1), (2, 1), groups=2), (2, 2, 33, 6)),
    "same": (lambda: nn.Conv2d(2, 3, 4, padding="same"), (2, 2, 13, 9)),
    "valid": (lambda: nn.Conv3d(2, 3, 3), (1, 2, 17, 5, 4)),
    "unbatched": (lambda: nn.Conv3d(2, 3, 3, padding=1), (2, 17, 5, 4)),
    "up1": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 2, 11)),
    "up2": (lambda: nn.ConvTranspose2d(2, 3, 5, stride=3, padding=2), (2, 2, 9, 4)),
    "sparse": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=4, dilation=2), (2, 2, 9, 4)),
    "up3": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (1, 2, 7, 3, 3)),
    "max": (lambda: nn.MaxPool2d(3, 2, 1), (2, 2, 29, 7)),
    "max1": (lambda: nn.MaxPool1d(3, 2, 1, dilation=2), (2, 2, 29)),
    "average": (lambda: nn.AvgPool3d(3, 2, 1), (1, 2, 19, 7, 6)),
    "average1": (lambda: nn.AvgPool1d(4), (1, 2, 32)),
    "nearest": (lambda: nn.Upsample(scale_factor=3), (1, 2, 7, 4)),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 7, 4)),
    "trilinear": (lambda: nn.Upsample(scale_factor=3, mode="trilinear"), (1, 2, 9, 4, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 9, 5)),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), (3, 4, 9, 5)),
    "batch norm": (lambda: nn.BatchNorm2d(4), (3, 4, 9, 5)),
    "layer norm": (lambda: nn.LayerNorm(5), (3, 4, 9, 5)),
    "linear": (lambda: nn.Linear(5, 3), (3, 4, 9, 5)),
    "pool": (lambda: nn.AdaptiveAvgPool3d(1), (2, 3, 9, 5, 4)),
    "flatten": (lambda: nn.Flatten(), (2, 3, 9, 5)),
    "softmax": (lambda: nn.Softmax(dim=1), (2, 3, 9, 5)),
}


def check_layers(comm: Communicator) -> None:
    """Outputs and all gradients of each layer are those of the whole tensor."""
    warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
    with Mesh({"space": comm.size}) as mesh:
        for number, (name, (make, shape)) in enumerate(LAYERS.items()):
            dimension = -2 if name in ("layer norm", "linear") else 2 - len(shape)
            dimension = -3 if name == "unbatched" else dimension
            torch.manual_seed(number)
            layer = make().double()
            whole = torch.randn(shape, dtype=torch.float64, requires_grad=True)
            wanted = layer(whole)
            weights = torch.randn(wanted.shape, dtype=torch.float64)
            (wanted * weights).sum().backward()
            gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
            layer.zero_grad()
            slab = mesh.slab(shape[dimension], dimension)
            local = whole.detach().narrow(dimension, slab.own[0], slab.length).clone()
            local.requires_grad_()
            out = layer(mesh.split(local, slab))
            if hasattr(out, "sharing"):
                axis, (first, _) = out.sharing.slab.dimension, out.sharing.slab.own
                assert torch.allclose(gather(out), wanted), name
                weights = weights.narrow(axis, first, out.sharing.slab.length)
                loss = (local_part(out) * weights).sum()
            else:
                assert torch.allclose(out, wanted), name
                loss = (out * weights).sum() / comm.size  # All ranks compute it.
            loss.backward()  # type: ignore[no-untyped-call]
            assert local.grad is not None
            assert whole.grad is not None
            expected = whole.grad.narrow(dimension, slab.own[0], slab.length)
            assert torch.allclose(local.grad, expected), name
            for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                assert parameter.grad is not None
                total = parameter.grad.numpy().copy()
                comm.wait([comm.iallreduce(total)], "gradients")
                assert np.allclose(total, gradient.numpy()), name


def check_functions(comm: Communicator) -> None:
    """Losses, sums and indices are those of the whole tensor; the rest is refused."""
    with Mesh({"space": comm.size}) as mesh:
        torch.manual_seed(5)
        whole = torch.randn(2, 3, 11, 4, dtype=torch.float64)
        other = torch.rand(2, 3, 11, 4, dtype=torch.float64)
        classes = torch.randint(0, 3, (2, 11, 4))
        x, y, z = (cut(each, mesh, -2) for each in (whole, other, classes))
        weight = torch.rand(3, dtype=torch.float64)
        pairs = [
            (functional.mse_loss(x, y), functional.mse_loss(whole, other)),
            (
                functional.l1_loss(x, y, reduction="sum"),
                functional.l1_loss(whole, other, reduction="sum"),
            ),
            (
                functional.binary_cross_entropy_with_logits(x, y),
                functional.binary_cross_entropy_with_logits(whole, other),
            ),
            (
                functional.cross_entropy(x, z, weight),
                functional.cross_entropy(whole, classes, weight),
            ),
            (
                functional.cross_entropy(x, y.softmax(1)),
                functional.cross_entropy(whole, other.softmax(1)),
            ),
            (x.sum(), whole.sum()),
            ((x > 0).sum(), (whole > 0).sum()),
            ((x.argmax(1) == z).float().mean(), (whole.argmax(1) == classes).float().mean()),
            (x.mean((2, 3)), whole.mean((2, 3))),
            (gather(x.mean(1)), whole.mean(1)),
            (gather(x.sum(3)), whole.sum(3)),
            (gather(x.sum(-1, keepdim=True)), whole.sum(-1, keepdim=True)),
            (gather(x.argmax(1)), whole.argmax(1)),
            (gather(x[:, 1:]), whole[:, 1:]),
            (gather(z.unsqueeze(1)), classes.unsqueeze(1)),
            (gather(z.unsqueeze(-1)), classes.unsqueeze(-1)),
            (
                gather(2 * x + y / 3 - weight.view(1, 3, 1, 1)),
                2 * whole + other / 3 - weight.view(1, 3, 1, 1),
            ),
            (gather(torch.where(x > 0, x, y)), torch.where(whole > 0, whole, other)),
            (gather(torch.cat([x, y], 1)), torch.cat([whole, other], 1)),
            (gather(functional.pad(x, (1, 1))), functional.pad(whole, (1, 1))),
        ]
        for number, (mine, wanted) in enumerate(pairs):
            assert torch.allclose(mine, wanted), number
        assert x.shape == (2, 3, mesh.slab(11, -2).length, 4)
        assert "tensor" in repr(x)
        single = mesh.cut(torch.ones(comm.size, 1), -2)  # One element on each rank.
        refused: list[Callable[[], object]] = [
            lambda: x.view(2, -1),
            lambda: x.permute(0, 2, 1, 3),
            lambda: x @ y.transpose(1, 2),
            lambda: x.softmax(2),
            lambda: x[:, :, 1:],
            lambda: x.T,
            lambda: torch.cat([x, y], 2),
            lambda: x + torch.ones(2, 3, 11 + 1, 4),
            lambda: functional.pad(x, (0, 0, 1, 0)),
            lambda: functional.interpolate(x, size=(22, 8)),
            lambda: functional.interpolate(x, scale_factor=1.5),
            lambda: functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
            lambda: functional.max_pool2d(x, 2, ceil_mode=True),
            lambda: functional.avg_pool2d(x, 3, padding=1, count_include_pad=False),
            lambda: functional.layer_norm(x, (11, 4)),
            lambda: functional.conv1d(x[0, 0], torch.ones(1, 11, 1)),
            lambda: functional.adaptive_avg_pool2d(x, 2),
            lambda: torch.fft.fft(x),
            lambda: float(single),
            lambda: bool(single),
            lambda: x.tolist(),
        ]
        for wrong in refused:
            with pytest.raises(UsageError, match=r"mesh\.gather|not supported"):
                wrong()
        net = nn.Conv2d(3, 1, 1)
        if comm.size > 1:
            with pytest.raises(UsageError, match="averages weights"):
                mesh.distribute(net, torch.optim.SGD(net.parameters()), "gossip")
        small = nn.Sequential(nn.MaxPool2d(4), nn.MaxPool2d((2, 1)))
        if comm.size > 1:
            with pytest.raises(UsageError, match="fewer than"):
                small(x)


def read_bytes() -> int:
    """Bytes that this process has read by system calls."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError("no rchar")


def check_reading(comm: Communicator) -> None:
    """Each rank reads its slab of its samples, once; ranks of a group get the same samples."""
    folder = Path(os.environ["MESH_DATA"])
    with mesh_of(comm) as mesh:
        for name in (
            *("rows.npy", "rows.h5::volume,label", "chunked.h5::volume,label", "rows.zarr"),
            "files",
        ):
            check_file(mesh, str(folder / name), np.load(folder / "rows.npy", mmap_mode="r"))


def check_file(mesh: Mesh, path: str, whole: npt.NDArray[np.float32]) -> None:
    name = "volume" if "rows.zarr" in path or "label" in path else "data"
    for tiers in ("none", "ram:64MiB"):
        samples = "files" if path.endswith("files") else None
        options: dict[str, Any] = {} if samples is None else {"samples": samples}
        data, slab = mesh.open(path, tiers=tiers, seed=3, **options)
        assert (slab.extent, slab.dimension) == (64, -3), slab
        first, last = slab.own
        with data, dlio.DataLoader(data, 2, True, mesh=mesh, num_workers=1) as loader:
            for epoch in range(2):
                loader.set_epoch(epoch)
                before, seen = read_bytes(), []
                for batch in loader:
                    # The number of a file is a field, as each file has a patch for each rank.
                    of_files = "position" in batch
                    numbers = batch["volume"].tolist() if of_files else loader.last_samples.tolist()
                    expected = torch.from_numpy(whole[numbers][:, :, first:last].copy())
                    assert torch.equal(batch[name], expected), (path, numbers)
                    seen += numbers
                counts = read_bytes() - before
                slabs = len(seen) * whole[0].nbytes * slab.length // slab.extent
                groups = mesh.along("space").allgather(seen)
                assert groups == [seen] * len(groups), path
                everyone = mesh.along("data").allgather(seen)
                assert sorted(n for each in everyone for n in each) == list(range(len(whole)))
                # The first pass imports modules, and patches keep chunks for the second one.
                # Reading a tier is a system call as well.
                if tiers == "none" and epoch == (not of_files):
                    print(f"{path}: {counts} bytes for {slabs}", file=sys.stderr)
                    assert slabs <= counts < 1.01 * slabs + (64 << 10), (path, counts, slabs)
            # Of both passes, and between them: a rank that is ahead still fills tiers for others.
            assert data.mounted is not None
            own = data.mounted.hierarchy.counters.bytes["source"]
            source = sum(mesh.along("data").allgather(own))
        slabs = whole.nbytes * slab.length // slab.extent
        if tiers != "none":
            assert slabs <= source < 1.01 * slabs, (path, source, slabs)


def check_fed(comm: Communicator) -> None:
    """A U-Net fed by the loader, a slab to each rank, trains as one process on whole samples."""
    path = str(Path(os.environ["MESH_DATA"], "segmented.h5"))
    torch.manual_seed(2)
    net, one = UNet(), UNet()
    one.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    reference = torch.optim.SGD(one.parameters(), lr=0.02, momentum=0.9)
    with mesh_of(comm) as mesh, dlio.open(path, tiers="none") as whole:
        data, slab = mesh.open(path, tiers="ram:16MiB", seed=4)
        batch_size = 2 // mesh.size("data")
        steps = 0
        with (
            data,
            dlio.DataLoader(data, batch_size, True, mesh=mesh, num_workers=1) as loader,
            mesh.distribute(net, optimizer),
        ):
            assert len(loader) == 4
            for epoch in range(STEPS // 4):
                loader.set_epoch(epoch)
                for batch in loader:
                    everyone = mesh.along("data").allgather(loader.last_samples.tolist())
                    x, y = (mesh.split(batch[name], slab) for name in ("volume", "classes"))
                    turns: list[Turn] = [(net, optimizer, x, y)]
                    if mesh.rank == 0:
                        samples = [whole[number] for rank in everyone for number in rank]
                        volumes, classes = (
                            torch.stack([torch.as_tensor(each[name]) for each in samples])
                            for name in ("volume", "classes")
                        )
                        turns.append((one, reference, volumes, classes))
                    for model, opt, images, labels in turns:
                        opt.zero_grad()
                        loss = functional.cross_entropy(model(images), labels)
                        loss.backward()  # type: ignore[no-untyped-call]
                        opt.step()
                    steps += 1
        assert steps == STEPS
        assert away_from_first(net, one) < 1e-5


def check_deadline(comm: Communicator) -> None:
    """A rank that waits for another's halo gets an error after the deadline."""
    mesh = Mesh({"space": comm.size})
    slab = mesh.slab(8, -2)
    x = mesh.split(torch.ones(1, 1, slab.length, 4), slab)
    layer = nn.Conv2d(1, 1, 3, padding=1)
    if comm.rank == 0:
        with pytest.raises(CommTimeout, match="edges"):
            layer(x)
    over = np.zeros(1, np.uint8)
    for rank in range(1, comm.size):
        if comm.rank == 0:
            comm.wait([comm.isend(over, rank, 1)], "the others", 60)
        elif comm.rank == rank:
            comm.wait([comm.irecv(over, 0, 1)], "the end of rank 0's deadline", 60)


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for check in sys.argv[1:]:
        CHECKS[check](world())
        print(f"kept {check}", flush=True)
