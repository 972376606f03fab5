"""Drawn pictures of the demonstration: drawn once, complete, and determined by the seed."""

from pathlib import Path

import numpy as np
import pytest

from dlio.cli import demo, demo_pictures, train_command
from dlio.cli.demo_pictures import PAINTERS, draw, draw_dataset, is_complete
from dlio.data.reader import open_reader
from dlio.errors import UsageError
from dlio.image.decoder import decode_whole, opencv


def test_pictures_have_the_requested_number_and_size(tmp_path: Path) -> None:
    folder = tmp_path / "drawn"
    calls: list[tuple[int, int]] = []
    draw_dataset(
        str(folder), images=22, validation=10, progress=lambda done, of: calls.append((done, of))
    )
    assert calls[-1] == (32, 32)
    reader = open_reader(str(folder / "train"))
    assert list(reader.classes) == sorted(PAINTERS)
    assert np.bincount(reader.labels).tolist() == [3, 3, *[2] * 8]
    for payload in reader.read(np.arange(22)):
        image = reader.schema.split(payload)["image"]
        assert isinstance(image, memoryview)
        assert all(200 <= side <= 500 for side in decode_whole(image, "x").shape[:2])
    assert len(open_reader(str(folder / "val"))) == 10


def test_a_complete_folder_is_kept_and_another_refused(tmp_path: Path) -> None:
    folder = tmp_path / "drawn"
    assert not is_complete(str(folder))
    draw_dataset(str(folder), images=4, validation=2, classes=2)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*.jpg")}
    assert len(before) == 6
    draw_dataset(str(folder), images=4, validation=2, classes=2)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*.jpg")} == before
    with pytest.raises(UsageError, match="something else"):
        draw_dataset(str(folder), images=5, validation=2, classes=2)
    assert is_complete(str(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["drawn"]


def test_an_interrupted_drawing_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, _: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw_dataset(str(tmp_path / "drawn"), images=8, validation=2, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(PAINTERS))
def test_a_picture_is_a_function_of_its_seed(name: str) -> None:
    one, two, other = (draw(name, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert np.array_equal(one, two)
    assert one.shape != other.shape or not np.array_equal(one, other)
    # Both background and ink appear: the picture is neither empty nor pure noise.
    assert one.std() > 20


def test_a_background_never_wraps_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAINTERS, "dots", lambda image, random, ink: None)
    for seed in range(30):
        ground = draw("dots", np.random.default_rng(seed)).astype(int)
        smooth = opencv().blur(ground.astype(np.float32), (9, 9))
        assert np.abs(np.diff(smooth, axis=0)).max() < 20
        assert np.abs(np.diff(smooth, axis=1)).max() < 20


@pytest.mark.parametrize(("share", "passes"), [(2.0, 12), (1.0, 12), (0.5, 6), (0.1, 3)])
def test_the_demo_makes_fewer_passes_over_more_pictures_than_it_draws(
    share: float,
    passes: int,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    count = len(open_reader(str(pictures)))
    seen: list[int] = []
    monkeypatch.setattr(demo_pictures, "IMAGES", round(share * count))
    monkeypatch.setattr(
        train_command, "run", lambda config, _: seen.append(config.optimizer.epochs)
    )
    demo.command(demo.DemoOptions(data=str(pictures), folder=str(tmp_path / "a")))
    is_said = f"3 passes over {count} images take about " in capsys.readouterr().out
    assert is_said == (share == 0.1)
    demo.command(demo.DemoOptions(data=str(pictures), folder=str(tmp_path / "b"), epochs=5))
    assert seen == [passes, 5]
