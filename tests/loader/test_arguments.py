"""Wrong arguments end in one line that names the argument, its value and the remedy."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dlio
from dlio import transforms
from dlio.data.reader import OPEN_ARGUMENTS
from dlio.errors import UsageError
from dlio.storage.tier_spec import parse_tiers
from dlio.train.config import train_config
from dlio.util.options import as_mapping


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("arguments")
    random = np.random.default_rng(0)
    for folder, side in (("classes/a", 40), ("classes/b", 40), ("flat", 30)):
        (root / folder).mkdir(parents=True)
        for k in range(4):
            pixels = random.integers(0, 255, (side + 2 * k, 50, 3), np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{k}.png")
    (root / "t.csv").write_text("width,height,label\n1,2,x\n3,4,y\n")
    return root


@pytest.fixture
def data(pictures: pathlib.Path) -> Iterator[dlio.Dataset]:
    with dlio.open(pictures / "classes", image_size=32, tiers="none") as opened:
        yield opened


def _is_clear(error: pytest.ExceptionInfo[Any], *words: str) -> None:
    text = str(error.value)
    assert isinstance(error.value, dlio.DlioError), repr(error.value)
    assert "\n" not in text
    assert len(text) < 400
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("image_size", (224, 0), "from 1 to 8192"),
        ("image_size", 224.0, "whole number"),
        ("image_size", "224", "auto"),
        ("image_size", True, "whole number"),
        ("image_size", [1], "whole number"),
        ("image_size", 0, "from 1 to 8192"),
        ("train", "yes", "True or False"),
        ("train", 1, "True or False"),
        ("follow_links", "yes", "True or False"),
        ("transform", 5, "function"),
        ("transform", [len], "function"),
        ("seed", "a", "whole number"),
        ("seed", 1.5, "whole number"),
        ("seed", -1, "from 0"),
        ("on_error", "skp", "did you mean skip?"),
        ("on_error", None, "stop or skip"),
        ("replicas", 5, "list of paths"),
        ("replicas", [5], "give a path"),
        ("tiers", 5, "ram:8GiB"),
        ("tiers", True, "ram:8GiB"),
        ("tiers", [5], "ram:8GiB"),
        ("tiers", b"ram:1GiB", "ram:8GiB"),
        ("tiers", {"ram": "1GiB"}, "ram:8GiB"),
        ("imagesize", 32, "did you mean image_size?"),
        ("tier", "none", "did you mean tiers?"),
    ],
)
def test_arguments_of_open(pictures: pathlib.Path, option: str, value: Any, remedy: str) -> None:
    with pytest.raises(dlio.UsageError) as error:
        dlio.open(pictures / "classes", **{option: value})
    _is_clear(error, option, remedy)


@pytest.mark.parametrize(
    ("tiers", "remedy"),
    [
        ("rma:1GiB", "did you mean ram?"),
        ("RAM:1GiB", "did you mean ram?"),
        ("raam:1GiB", "did you mean ram?"),
        ("memory:1GiB", "did you mean ram?"),
        ("nonee:1GiB", "did you mean none?"),
        ("ram:lots", "20GiB"),
        ("ram:1XB", "20GiB"),
        ("ram:99999999TiB", "2^62"),
        ("ram:1GiB:decodd", "did you mean decoded?"),
        ("ram:1GiB,,", "empty"),
        ("ram", "has no size"),
        ("8G", "write ram:8G"),
        ("1.5 GiB", "write ram:1.5 GiB"),
        ("ram:0GiB", "would hold nothing"),
    ],
)
def test_mistyped_tiers(tiers: str, remedy: str, pictures: pathlib.Path) -> None:
    with pytest.raises(dlio.UsageError) as error:
        dlio.open(pictures / "classes", tiers=tiers)
    _is_clear(error, remedy)


@pytest.mark.parametrize("generator", [3, np.random.default_rng(0)])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_that_is_none_of_torch(generator: Any, workers: int) -> None:
    with pytest.raises(dlio.UsageError) as error:
        dlio.DataLoader([1, 2], shuffle=True, num_workers=workers, generator=generator)
    _is_clear(error, "generator=", "torch.Generator")


@pytest.mark.parametrize("path", [None, 5, b"x", object(), "", [], "/nope", pathlib.Path("/nope")])
def test_paths_that_are_none(path: object) -> None:
    with pytest.raises(dlio.DlioError) as error:
        dlio.open(path)
    _is_clear(error)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_workers", "2"),
        ("num_workers", 1.5),
        ("num_workers", None),
        ("num_workers", 10**6),
        ("prefetch_factor", "x"),
        ("prefetch_factor", 2.5),
        ("timeout", "x"),
        ("timeout", None),
        ("timeout", -1),
        ("sampler", 5),
        ("batch_sampler", 5),
        ("collate_fn", 5),
        ("worker_init_fn", 5),
        ("tiers", 5),
        ("mode", "btach"),
        ("mode", 5),
        ("source_order", "blok"),
        ("source_order", 5),
        ("seed", "x"),
        ("seed", 1.5),
        ("seed", -1),
        ("workers", "threads"),
        ("on_error", "stp"),
        ("device", "cdua"),
        ("device", 1.5),
        ("shares", 5),
        ("shares", ["a"]),
        ("shares", [-1]),
        ("shares", [2.5]),
        ("trace", 5),
        ("writer", 5),
        ("pretend_nodes", 0),
        ("pretend_nodes", "x"),
        ("group", 5),
        ("mesh", 5),
    ],
)
def test_arguments_of_the_loader(data: dlio.Dataset, option: str, value: Any) -> None:
    batch_size = 1 if option == "batch_sampler" else 2

    def first() -> object:
        given: Any = {"batch_size": batch_size, option: value}
        return next(iter(dlio.DataLoader(data, **given)))

    with pytest.raises(dlio.DlioError) as error:
        first()
    _is_clear(error, option.replace("_", " ") if option == "source_order" else option)


@pytest.mark.parametrize("dataset", [None, 5, object()])
def test_a_loader_of_something_else(dataset: object) -> None:
    with pytest.raises(dlio.UsageError) as error:
        dlio.DataLoader(dataset)
    _is_clear(error, "dlio.open")


@pytest.mark.parametrize("index", [[0, 1], "a", 1.5, None, np.array([0, 1]), (0, 1), ...])
def test_indices_that_are_none(data: dlio.Dataset, index: Any) -> None:
    with pytest.raises(TypeError, match="whole number or a slice"):
        data[index]


def test_a_slice_is_a_view(data: dlio.Dataset) -> None:
    part = data[1:6:2]
    assert [label for _, label in part] == [data[k][1] for k in (1, 3, 5)]
    with dlio.DataLoader(part, batch_size=3) as loader:
        images, labels = next(iter(loader))
        assert loader.stats()["engine"] == "planned"
    assert images.shape == (3, 3, 32, 32)
    assert labels.tolist() == [data[k][1] for k in (1, 3, 5)]
    assert [len(data[-2:]), len(data[:0])] == [2, 0]
    assert torch.equal(data[np.int64(1)][0], data[1][0])
    assert torch.equal(data[torch.tensor(-1)][0], data[7][0])


def test_paths_of_pathlib(pictures: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "tier").mkdir()
    trace = tmp_path / "trace.json"
    tiers: Any = ["ram:64MB", (tmp_path / "tier", "1G")]
    source = pictures / "classes"
    with (
        dlio.open(source, image_size=32, tiers=tiers, replicas=[source]) as data,
        dlio.DataLoader(data, batch_size=4, trace=trace) as loader,
    ):
        assert sum(len(labels) for _, labels in loader) == 8
        assert data.mounted is not None
        assert [spec.capacity for spec in data.mounted.tiers] == [64 * 10**6, 2**30]
    assert trace.is_file()
    with dlio.open([source], tiers="none") as data:
        assert len(data) == 8
    with dlio.open(source, tiers=pathlib.Path(f"{tmp_path}/tier:1GiB"), replicas=source) as data:
        assert len(data) == 8


class _Broken:
    def __call__(self, sample: object) -> object:
        raise KeyError("no such key")


@pytest.mark.parametrize("place", ["classes", "flat", "t.csv"])
@pytest.mark.parametrize("take", [lambda d: d[1], lambda d: next(iter(dlio.DataLoader(d)))])
def test_errors_of_a_transform_name_the_sample(
    pictures: pathlib.Path, place: str, take: Callable[[dlio.Dataset], object]
) -> None:
    with (
        dlio.open(pictures / place, transform=_Broken(), tiers="none") as data,
        pytest.raises(KeyError, match="no such key") as error,
    ):
        take(data)
    (note,) = error.value.__notes__
    assert "transform= of sample" in note
    assert str(pictures / place) in note


@pytest.mark.parametrize("size", ["32", "32x48", "Auto", (32,), (1, 2, 3)])
def test_a_wrong_size_of_images_names_what_is_taken(pictures: pathlib.Path, size: Any) -> None:
    with pytest.raises(dlio.UsageError, match=r"\(height, width\), 'auto' or None"):
        dlio.open(pictures / "flat", image_size=size, tiers="none")


def test_a_state_of_another_kind_of_order_is_named(pictures: pathlib.Path) -> None:
    state = dlio.DataLoader(list(range(8)), 4, shuffle=True).state_dict()
    with (
        dlio.open(pictures / "flat", image_size=8, tiers="none") as data,
        pytest.raises(dlio.UsageError, match="follows a sampler or torch's order"),
    ):
        dlio.DataLoader(data, 4).load_state_dict(state)


def test_whole_photos_of_several_sizes_cannot_be_stacked(pictures: pathlib.Path) -> None:
    with (
        dlio.open(pictures / "flat", image_size=None, tiers="none") as data,
        dlio.DataLoader(data, batch_size=2) as loader,
        pytest.raises(dlio.UsageError) as error,
    ):
        next(iter(loader))
    _is_clear(error, "image_size=", "transform=", "shapes")


@pytest.mark.parametrize(
    ("path", "options", "remedy"),
    [
        ("t.csv", {"columns": 5}, "list of names"),
        ("t.csv", {"columns": ["widht"]}, "did you mean width?"),
        ("t.csv", {"separator": 5}, "give text"),
        ("t.csv", {"colums": ["width"]}, "did you mean columns?"),
        ("t.csv::lable", {}, "did you mean label?"),
        ("classes", {"columns": ["a"]}, "no such option"),
    ],
)
def test_options_of_readers(
    pictures: pathlib.Path, path: str, options: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(dlio.UsageError) as error:
        dlio.open(f"{pictures}/{path}", **options)
    _is_clear(error, remedy)


def test_suggestions_know_the_arguments() -> None:
    import inspect

    own = list(inspect.signature(dlio.open).parameters)
    assert own == ["path", *OPEN_ARGUMENTS, "options"]


@pytest.mark.parametrize(
    "state", [None, 5, "x", [], {}, {"a": 1}, {"epoch": "x"}], ids=lambda state: repr(state)
)
def test_states_of_something_else(data: dlio.Dataset, state: Any) -> None:
    loader = dlio.DataLoader(data, batch_size=2)
    with pytest.raises(dlio.DlioError) as error:
        loader.load_state_dict(state)
    _is_clear(error)


@pytest.mark.parametrize("epoch", ["x", -1, None, 1.5])
def test_epochs(data: dlio.Dataset, epoch: Any) -> None:
    loader = dlio.DataLoader(data, batch_size=2)
    for set_epoch in (loader.set_epoch, data.set_epoch):
        with pytest.raises(dlio.UsageError) as error:
            set_epoch(epoch)
        _is_clear(error, "epoch", "whole number")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: transforms.Resize("x"), "size='x'"),  # type: ignore[arg-type]
        (lambda: transforms.Resize((1, 2, 3)), "size=(1, 2, 3)"),
        (lambda: transforms.CenterCrop(0), "size=0"),
        (lambda: transforms.RandomResizedCrop(32, 5), "two numbers"),  # type: ignore[arg-type]
        (lambda: transforms.RandomHorizontalFlip(2), "from 0 to 1"),
        (lambda: transforms.Normalize(5, 5), "per channel"),  # type: ignore[arg-type]
        (lambda: transforms.Normalize([0.1], ["x"]), "per channel"),  # type: ignore[list-item]
        (lambda: transforms.Compose([5]), "function"),  # type: ignore[list-item]
    ],
)
def test_arguments_of_transforms(make: Callable[[], object], words: str) -> None:
    with pytest.raises(dlio.DlioError) as error:
        make()
    _is_clear(error, words)


@pytest.mark.parametrize(
    ("option", "value", "made"),
    [
        ("checkpoint", pathlib.Path("/ck"), "/ck"),
        ("report", pathlib.Path("/r.json"), "/r.json"),
        ("replica", pathlib.Path("/copy"), ("/copy",)),
        ("replica", ["/copy", pathlib.Path("/other")], ("/copy", "/other")),
        ("tiers", pathlib.Path("/local:1G"), "/local:1G"),
    ],
)
def test_paths_in_records(option: str, value: Any, made: object) -> None:
    given: Any = {"source": pathlib.Path("/data"), option: value}
    config = train_config(**given)
    assert config.data.source == "/data"
    assert as_mapping(config)[option] == made


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("epochs", "x"),
        ("epochs", 2.5),
        ("lr", "x"),
        ("tiers", 5),
        ("report", 5),
        pytest.param("skip_samples", "yes", marks=pytest.mark.needs("skipping")),
        ("shuffle", "btach"),
        ("exchange", "gosip"),
    ],
)
def test_wrong_values_in_records(option: str, value: Any) -> None:
    with pytest.raises(dlio.UsageError) as error:
        train_config("/data", **{option: value})
    _is_clear(error, str(value))


@pytest.mark.parametrize("path", ["a\0b", "~\0", ["a", "b\0"], "x.h5::a\0"])
def test_a_path_with_a_byte_of_zero_is_refused(path: str | list[str]) -> None:
    with pytest.raises(UsageError, match="cannot have a byte of zero"):
        dlio.open(path)


def test_a_tier_with_a_byte_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot have a byte of zero"):
        parse_tiers("~\0:1GiB")
