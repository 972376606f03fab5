"""Meshes: the checks of `mesh_checks` and `parallel_checks` on real ranks."""

import runpy
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import zarr

import dlio
from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.features.mesh.dtensor_layers import average_gradients, tensor_parallel
from dlio.features.mesh.split_tensor import gather
from tests.conftest import MpiRun, TorchRun
from tests.features.mesh.nets import Transformer

BODY = Path(__file__).with_name("mesh_checks.py")
PARALLEL = Path(__file__).with_name("parallel_checks.py")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "checks"),
    [
        (2, ("layers", "functions", "memory", "unet", "cosmoflow", "pictures")),
        (3, ("layers", "groups", "pictures")),
        (4, ("layers", "functions", "memory", "unet", "cosmoflow", "pictures")),
        (4, ("groups",)),
    ],
)
@pytest.mark.daily("2-checks0")
def test_ranks_compute_what_one_process_does(
    mpirun: MpiRun, ranks: int, checks: tuple[str, ...]
) -> None:
    done = mpirun(ranks, str(BODY), *checks)
    assert done.returncode == 0, done.stderr
    for check in checks:
        assert done.stdout.splitlines().count(f"kept {check}") == ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight volumes of 1 MiB, as rows of arrays and as files."""
    made = tmp_path_factory.mktemp("volumes")
    volumes = np.random.default_rng(0).random((8, 2, 64, 32, 64), np.float32)
    labels = np.arange(8, dtype=np.int64)
    np.save(made / "rows.npy", volumes)
    with h5py.File(made / "rows.h5", "w") as file:
        file["volume"], file["label"] = volumes, labels
    with h5py.File(made / "segmented.h5", "w") as file:
        file["volume"] = volumes[:, :1, :16, :8, :8]
        file["classes"] = (volumes[:, 0, :16, :8, :8] > 0.5).astype(np.int64)
    with h5py.File(made / "chunked.h5", "w") as file:
        file.create_dataset("volume", data=volumes, chunks=(1, 1, 16, 32, 64), compression=None)
        file["label"] = labels
    group = zarr.open_group(made / "rows.zarr", mode="w")
    array = group.create_array(
        "volume", shape=volumes.shape, chunks=(1, 1, 16, 32, 64), dtype="f4", compressors=None
    )
    array[...] = volumes
    (made / "files").mkdir()
    for number, volume in enumerate(volumes):
        np.save(made / "files" / f"{number}.npy", volume)
    return made


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.daily("2")
def test_each_rank_reads_its_slab_once_and_trains_on_it(
    mpirun: MpiRun, folder: Path, ranks: int
) -> None:
    done = mpirun(ranks, str(BODY), "reading", "fed", env={"MESH_DATA": str(folder)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("kept reading") == ranks
    assert done.stdout.splitlines().count("kept fed") == ranks


@pytest.mark.mpi
def test_a_rank_does_not_wait_for_a_halo_for_ever(mpirun: MpiRun) -> None:
    done = mpirun(2, str(BODY), "deadline", env={"DLIO_TIMEOUT": "2"})
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """32 sequences with labels."""
    path = tmp_path_factory.mktemp("sequences") / "rows.h5"
    generator = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["sequence"] = generator.standard_normal((32, 6, 8), np.float32)
        file["label"] = generator.integers(0, 5, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESH_SEQUENCES", str(path))
        yield path


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.daily("2")
def test_a_transformer_in_parts_trains_as_one_process(
    torchrun: TorchRun, sequences: Path, ranks: int
) -> None:
    for said in torchrun(ranks, str(PARALLEL), "parallel", "samples"):
        assert said.splitlines() == ["kept parallel", "kept samples"]


def test_fsdp2_trains_through_the_loader(torchrun: TorchRun, sequences: Path) -> None:
    for said in torchrun(2, str(PARALLEL), "sharded"):
        assert said.splitlines() == ["kept sharded"]


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "check"), [(4, "parallel"), (2, "sharded")])
@pytest.mark.nightly  # By day, the test above has ranks of torchrun.
def test_layers_in_parts_use_the_process_group_over_mpi(
    mpirun: MpiRun, sequences: Path, ranks: int, check: str
) -> None:
    done = mpirun(ranks, str(PARALLEL), check)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count(f"kept {check}") == ranks


def test_layers_of_torch_ranks_compute_what_one_process_does(torchrun: TorchRun) -> None:
    for said in torchrun(2, str(BODY), "layers"):
        assert said.splitlines() == ["kept layers"]


@pytest.mark.parametrize("check", ["layers", "functions", "groups"])
def test_one_process_needs_no_messages(check: str) -> None:
    runpy.run_path(str(BODY))["CHECKS"][check](SingleCommunicator())


def test_uses_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with dlio.Mesh("data=1") as mesh:
        assert repr(mesh).startswith("dlio.Mesh('data=1', rank 0")
        with pytest.raises(UsageError, match="axis"):
            mesh.along("depth")
        with pytest.raises(UsageError, match=r"init_process_group\(\) first"):
            mesh.device_mesh()
        plain = torch.ones(2)
        assert gather(plain) is plain
        net = Transformer(8)
        assert tensor_parallel(net, {"*.nothing": "row"}, mesh) is net  # One rank has it all.
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        average_gradients(mesh, optimizer).close()
        np.save(tmp_path / "flat.npy", np.arange(6))
        with pytest.raises(UsageError, match="no arrays of one shape"):
            mesh.open(str(tmp_path / "flat.npy"))
        np.save(tmp_path / "rows.npy", np.zeros((4, 3, 5), np.float32))
        with pytest.raises(UsageError, match="count from the last one"):
            mesh.open(str(tmp_path / "rows.npy"), dimension=-4)
        data, slab = mesh.open(str(tmp_path / "rows.npy"))
        assert (slab.extent, slab.dimension, len(data)) == (5, -1, 4)
        data.close()
    with pytest.raises(UsageError, match="batch_norm"):
        dlio.Mesh("data=1", batch_norm="global")
