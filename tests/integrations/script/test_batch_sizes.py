"""Lines that take the size of a training batch as a number are found in the loop's source."""

from pathlib import Path

import pytest

from dlio.integrations.script.batch_sizes import size_lines


@pytest.mark.parametrize(
    "line",
    [
        "total += loss.item() * x.size(0)",
        "print(f'{k * len(x)} samples')",
        "print('%d' % (k * x.shape[0]))",
        "meter.update(loss.item(), x.size(0))",
        "if len(y) < 8: continue",
        "seen = seen + x.size()[0]",
        "n = len(x); total += n",
        "images = x.to('cpu'); total += images.size(0)",
        "mean = loss.item() / len(batch['x'])",
        "for part in batch: seen += len(part)",
    ],
)
def test_a_number_is_found(line: str, tmp_path: Path) -> None:
    assert _lines(line, tmp_path) == ("loop.py:3",)


@pytest.mark.parametrize(
    "line",
    [
        "z = torch.randn(x.size(0), 10)",
        "x = x.view(len(x), -1)",
        "n = x.size(0); labels = torch.full((n,), 1.0)",
        "half = x[: len(x) // 2]",
        "print(k * len(loader))",
        "loss = criterion(model(x), y)",
        "total += x.size(1)",
        "x = accelerator.gather_for_metrics(x); total += len(x)",
    ],
)
def test_shapes_and_other_sizes_are_left(line: str, tmp_path: Path) -> None:
    assert _lines(line, tmp_path) == ()


def test_samples_in_the_second_dimension_are_counted_there(tmp_path: Path) -> None:
    for line in ("total += x.size(1)", "seen += y.shape[1]"):
        assert _lines(line, tmp_path / line[:4], dim=1) == ("loop.py:3",)
    assert _lines("total += len(x) * x.shape[0]", tmp_path / "first", dim=1) == ()


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("print(loss.item() / len(x))", True),
        ("if k: print(n)", True),
        ("print(len(loader))", False),
        ("x = held; print(len(x))", False),
        ("for x, y in held_loader: total += len(x)", False),
    ],
)
def test_a_size_is_found_after_the_loop_while_its_name_is_the_batch_s(
    line: str, counts: bool, tmp_path: Path
) -> None:
    script = tmp_path / "loop.py"
    loop = "for epoch in range(2):\n    for x, y in loader:\n        n = len(x)\n"
    script.write_text(f"{loop}    {line}\n")
    assert size_lines(str(script), 2) == (("loop.py:4",) if counts else ())


@pytest.mark.parametrize("head", ["while step < 9:", "for step in range(9):"])
def test_a_size_of_batches_that_are_taken_by_next_is_found(head: str, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(f"{head}\n    x, y = next(batches)\n    seen += len(x)\nprint(x.shape[0])\n")
    assert size_lines(str(script), 2) == ("loop.py:3", "loop.py:4")


def _lines(line: str, folder: Path, dim: int = 0) -> tuple[str, ...]:
    folder.mkdir(exist_ok=True)
    script = folder / "loop.py"
    loop = "for k, ((x, y), batch) in enumerate(loader):"
    script.write_text(f"{loop}\n    pass\n    {line}\n")
    return size_lines(str(script), 1, dim)
