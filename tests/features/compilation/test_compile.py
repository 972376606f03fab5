"""`--compile`: runs whose model torch has compiled."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from dlio.errors import UsageError
from dlio.features.compilation.compiled_model import CompileHooks
from dlio.train.config import train_config
from dlio.train.trainer import train
from tests.conftest import MpiRun, has_feature


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without code for the processor, which takes long to make."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def trained(folder: Path, file: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a short run."""
    common: dict[str, Any] = {"epochs": 2, "image_size": 32, "model": "convnet(width=4)"}
    source = {"source": str(folder / "train"), "val": str(folder / "val"), "save": str(file)}
    train(train_config(**{**common, **source, **options}))
    state: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return state


@pytest.mark.usefixtures("_quick")
def test_a_compiled_run_equals_a_plain_one(pictures: Path, tmp_path: Path) -> None:
    others = {"ema": 0.9, "batch_norm": "sync"}
    options: dict[str, Any] = {name: others[name] for name in others if has_feature(name)}
    options["epochs"] = 1
    plain = trained(pictures, tmp_path / "plain.pt", **options)
    assert not counters["frames"]["ok"]
    folder = str(tmp_path / "c")
    state = trained(pictures, tmp_path / "c.pt", compile=True, checkpoint=folder, **options)
    assert counters["frames"]["ok"]
    assert list(state) == list(plain)
    for name, value in plain.items():
        assert torch.allclose(state[name], value, atol=1e-4), name
    # Names in checkpoints are those of the model: a run that is not compiled goes on.
    more = {**options, "epochs": 2, "checkpoint": folder, "resume": True}
    assert list(trained(pictures, tmp_path / "on.pt", **more)) == list(plain)


@pytest.mark.nightly
@pytest.mark.needs("pruning")
@pytest.mark.usefixtures("_quick")
def test_a_compiled_run_is_pruned(pictures: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"prune": "apoptosis", "prune_tolerance": 50.0, "epochs": 6}
    plain = trained(pictures, tmp_path / "p.pt", batch_size=8, **options)
    state = trained(pictures, tmp_path / "c.pt", batch_size=8, compile=True, **options)
    before = counters["frames"]["ok"]
    assert before > 1  # Once more after each round.
    whole = trained(pictures, tmp_path / "w.pt", epochs=1)
    for each in (plain, state):
        assert list(each) == list(whole)
        sizes = [sum(value.numel() for value in made.values()) for made in (each, whole)]
        assert sizes[0] < sizes[1]


@pytest.mark.nightly
@pytest.mark.mpi
def test_ranks_that_normalise_together_compile(mpirun: MpiRun, pictures: Path) -> None:
    done = mpirun(2, str(Path(__file__).with_name("compile_checks.py")), str(pictures))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("kept") == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exchange": "gossip"}, "--compile does not go with --exchange gossip"),
        ({"exchange": "noloco(8)"}, r"--compile does not go with --exchange noloco\(8\)"),
        pytest.param(
            {"task": "autoencode", "layerwise": 1},
            "--compile does not go with --layerwise",
            marks=pytest.mark.needs("layerwise"),
        ),
        pytest.param(
            {"mesh": "space=2"},
            "--compile does not go with --mesh",
            marks=pytest.mark.needs("mesh"),
        ),
    ],
)
def test_options_that_compiled_models_cannot_have_are_refused(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        train_config(source="data", compile=True, **options)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    run: Any = SimpleNamespace(model=torch.nn.Linear(1, 1), device=torch.device("cpu"))
    with pytest.raises(UsageError, match="no-such-compiler is not found"):
        CompileHooks(None, run).wrapped(run, run.model)
