"""`decode="device"`: the loader's batches are those of `decode="cpu"`, by nvImageCodec's CPU
backend."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dlio
from dlio import transforms as T  # noqa: N812 - as everybody calls them
from dlio.errors import DecodeError, UsageError
from dlio.image.decoder import decode_whole, image_size
from dlio.image.device_decode.encoded_image import header_of
from dlio.image.device_decode.nvimagecodec import is_installed
from dlio.loader import loader_options
from tests.image.jpegs import drawn
from tests.loader.targets_data import drawn as drawn_boxes
from tests.loader.targets_data import write_coco

BODY = str(Path(__file__).with_name("device_decode_checks.py"))
needs_library = pytest.mark.skipif(
    not is_installed(), reason="nvImageCodec is not installed (extra gpu)"
)


def _mixed(partners: Any) -> T.Compose:
    erasing = T.RandomErasing(0.5, value="random")
    normal = T.Normalize([0.5] * 3, [0.2] * 3)
    steps: list[Any] = [T.RandomResizedCrop(32), T.RandomHorizontalFlip(), normal, erasing]
    return T.Compose([*steps, T.MixUp(partners=partners)])


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "plain": lambda: T.RandomResizedCrop((40, 28)),
    "crops": lambda: T.Compose([T.RandomResizedCrop(24, crops=2), T.RandomVerticalFlip()]),
    "mixed in steps": lambda: _mixed("step"),
    "mixed in ranks": lambda: _mixed("rank"),
}


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of JPEGs of all kinds, small enough not to be shrunk, and two PNGs."""
    root, rng = tmp_path_factory.mktemp("jpegs"), np.random.default_rng(0)
    kinds = ("baseline", "restarts", "lengths", "1x2", "progressive", "cmyk")
    for k in range(24):
        path = root / f"{k % 2}" / f"{k:02d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(drawn(rng, kinds[k % len(kinds)], 40))
    for k in range(2):
        Image.new("RGB", (30, 20 + k), (200, 20, 90)).save(root / f"{k}" / "own.png")
    return root


def _batches(
    folder: Path, decode: Any, transform: Any, epochs: int = 1, **options: Any
) -> tuple[list[tuple[Any, list[int]]], Any]:
    """((batch, its samples) in order, statistics of the last pass)."""
    with (
        dlio.open(str(folder), tiers="none", transform=transform, seed=3) as data,
        dlio.DataLoader(data, 5, True, device="cpu", decode=decode, **options) as loader,
    ):
        made = []
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            made += [(batch, loader.last_samples.tolist()) for batch in loader]
        return made, loader.stats()


def _same(one: list[tuple[Any, list[int]]], other: list[tuple[Any, list[int]]]) -> None:
    for (batch, samples), (wanted, theirs) in zip(one, other, strict=True):
        assert samples == theirs
        torch.testing.assert_close(batch[1], wanted[1], rtol=0, atol=0)
        assert batch[0].dtype == wanted[0].dtype
        assert batch[0].stride() == wanted[0].stride()
        # One step of 255, after Normalize with a standard deviation of 0.2.
        most = 1 if batch[0].dtype == torch.uint8 else 5 / 255
        assert (batch[0].double() - wanted[0].double()).abs().max() <= most


@needs_library
@pytest.mark.parametrize("name", TRANSFORMS)
def test_batches_are_those_of_the_cpu(jpegs: Path, name: str) -> None:
    make = TRANSFORMS[name]
    wanted, _ = _batches(jpegs, "cpu", make(), 2)
    for threads in (1, 3):
        made, stats = _batches(jpegs, "device", make(), 2, num_workers=threads)
        _same(made, wanted)
        assert [len(samples) for _, samples in made] == [5] * 5 + [1] + [5] * 5 + [1]
        # Progressive, CMYK and PNG: 8 and 2 of 26, and none is the partner of a sample elsewhere.
        assert stats["fallbacks"] >= 10
        assert stats["device_images"] + stats["fallbacks"] >= 26
        assert stats["device_bytes"] > 0


@needs_library
def test_a_collate_function_gets_crops_on_the_device(jpegs: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack([image for image, _ in samples]), torch.tensor([k for _, k in samples])

    for transform in (TRANSFORMS["plain"](), T.RandomResizedCrop(16)):
        wanted, _ = _batches(jpegs, "cpu", transform)
        made, _ = _batches(jpegs, "device", transform, collate_fn=collate)
        for (batch, samples), (theirs, numbers) in zip(made, wanted, strict=True):
            assert samples == numbers
            assert torch.equal(batch[0], theirs[0])
            assert torch.equal(batch[1], theirs[1])


@needs_library
def test_boxes_move_with_the_crops(tmp_path: Path) -> None:
    write_coco(tmp_path, drawn_boxes(1, 8), "jpg")
    seen = {}
    for decode in ("cpu", "device"):
        with (
            dlio.open(str(tmp_path), tiers="none", image_size=48, train=True, seed=2) as data,
            dlio.DataLoader(data, 8, device="cpu", decode=decode) as loader,
        ):
            seen[decode] = next(iter(loader))
    for one, other in zip(seen["device"][1], seen["cpu"][1], strict=True):
        assert one.keys() == other.keys()
        assert torch.equal(one["boxes"], other["boxes"])
        assert torch.equal(one["labels"], other["labels"])
    off = seen["device"][0].double() - seen["cpu"][0].double()
    assert off.abs().mean() <= 2


def _with_bad_table(image: bytes) -> bytes:
    """Damage a Huffman table so that only decoding finds it: the headers and markers are right."""
    for at in range(image.index(b"\xff\xc4"), image.index(b"\xff\xda")):
        damaged = image[:at] + b"\xf8" + image[at + 1 :]
        if header_of(damaged) is not None:
            try:
                decode_whole(damaged, "")
            except DecodeError as error:
                if "Bogus Huffman table" in str(error):
                    return damaged
    raise AssertionError("no byte does it")


@needs_library
def test_damaged_images_are_the_cpus_errors(jpegs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(jpegs, folder)
    rng = np.random.default_rng(1)
    whole = drawn(rng, "baseline", 40)
    (folder / "0" / "short.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "1" / "text.jpg").write_bytes(b"not a picture")
    (folder / "1" / "table.jpg").write_bytes(_with_bad_table(whole))
    made, errors = {}, {}
    for decode in ("cpu", "device"):
        transform = T.RandomResizedCrop(16)
        made[decode], stats = _batches(folder, decode, transform, on_error="skip")
        assert sorted(stats["skipped"]) == ["0/short.jpg", "1/table.jpg", "1/text.jpg"]
        with pytest.raises(DecodeError) as error:
            _batches(folder, decode, transform, num_workers=1)
        errors[decode] = str(error.value)
    _same(made["device"], made["cpu"])
    assert errors["device"] == errors["cpu"]
    mixed = {
        decode: _batches(folder, decode, _mixed("step"), on_error="skip")[0] for decode in made
    }
    _same(mixed["device"], mixed["cpu"])


@needs_library
def test_only_touched_restart_intervals_are_sent(tmp_path: Path) -> None:
    rng, size = np.random.default_rng(2), 0
    (tmp_path / "0").mkdir()
    while len(list((tmp_path / "0").iterdir())) < 8:
        image = drawn(rng, "lengths", 300)
        if min(image_size(image, "")) > 120:
            (tmp_path / "0" / f"{len(image)}.jpg").write_bytes(image)
            size += len(image)
    _, stats = _batches(tmp_path, "device", T.RandomResizedCrop(32, scale=(0.1, 0.2)))
    assert stats["fallbacks"] == 0
    assert stats["device_images"] == 8
    assert 0 < stats["device_bytes"] < 0.8 * size


@needs_library
def test_the_cpus_part_is_said_once(jpegs: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dlio"):
        _batches(jpegs, "device", T.RandomResizedCrop(16), 2)
    assert sum("decoded by the CPU" in line for line in caplog.messages) == 1


@needs_library
@pytest.mark.mpi
def test_ranks_share_the_samples_as_with_the_cpu(
    jpegs: Path, mpirun: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = mpirun(2, BODY, str(jpegs))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 2
    for line in lines:
        assert line["device"] == line["cpu"]
        assert line["most"] <= 5 / 255
    assert sorted(k for line in lines for k in line["cpu"]) == list(range(26))


@needs_library
@pytest.mark.cold
def test_a_script_that_leaves_its_loader_open_ends_well_and_quietly(jpegs: Path) -> None:
    script = (
        "import dlio, sys\n"
        "data = dlio.open(sys.argv[1], tiers='none', image_size=16, train=True)\n"
        "loader = dlio.DataLoader(data, 5, True, device='cpu', decode='device', num_workers=2)\n"
        "next(iter(loader))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(jpegs)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all("decoded by the CPU" in line for line in done.stderr.splitlines())


def _refused(dataset: Any, match: str, **options: Any) -> None:
    def begin() -> None:
        with dlio.DataLoader(
            dataset, 2, **{"device": "cpu", "decode": "device", **options}
        ) as made:
            next(iter(made))

    with pytest.raises(UsageError, match=match):
        begin()


@needs_library
def test_what_a_device_cannot_make_is_refused(jpegs: Path, tmp_path: Path) -> None:
    with dlio.open(str(jpegs), tiers="none", image_size=16) as data:
        _refused(data, "device='cuda', too", device=None)
        _refused(data, "on mps", device="mps")
        _refused(data, "worker processes", workers="process", num_workers=1)
        _refused(data, "leave decode= out", sampler=iter([1, 2]))
        _refused(data, "decode", decode="gpu")
    _refused(torch.utils.data.TensorDataset(torch.arange(4)), "leave decode= out")
    unsuitable: list[dict[str, Any]] = [
        {"transform": T.Compose([T.RandomResizedCrop(16), T.ColorJitter(0.4)])},
        {"transform": T.Compose([T.RandomResizedCrop(16), lambda image: image])},
        {"image_size": None},
        {"image_size": 16, "train": True, "tiers": "ram:1MiB:decoded"},
    ]
    for options in unsuitable:
        with dlio.open(str(jpegs), **{"tiers": "none", **options}) as data:
            _refused(data, "decode='device'")


def test_without_the_library_the_extra_is_named(
    jpegs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_options, "is_installed", lambda: False)
    with dlio.open(str(jpegs), tiers="none", image_size=16) as data:
        _refused(data, "extra gpu")
