"""`dlio demo`: the main job on pictures that it draws itself, or on yours."""

import os
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from dlio.errors import UsageError
from dlio.train.config import TrainConfig

_FOLDER = os.path.join(".cache", "dlio-demo")
_LEAST_RAM = 1 << 20


def command(
    data: Annotated[
        str | None, typer.Option(help="Your own images: class folders, or train/ and val/.")
    ] = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="MPI ranks.", min=1)] = 2,
    epochs: Annotated[int, typer.Option(help="Passes over the data.", min=1)] = 12,
    image_size: Annotated[int, typer.Option(help="Side of the crops, in pixels.")] = 64,
    folder: Annotated[
        str, typer.Option(help="Where the pictures, the disk tier and the report go.")
    ] = _FOLDER,
    report: Annotated[str | None, typer.Option(help="JSON report; FOLDER/report.json.")] = None,
    draw_only: Annotated[bool, typer.Option(help="Draw the pictures and stop.")] = False,
) -> None:
    """Train on a small data set with 2 ranks, a RAM tier, a disk tier, and a shuffle between two
    pretended nodes, while neurons die and samples that are learnt are left out; under three minutes
    on two cores."""
    from dlio.cli.train import find_parts, run

    _make_folder(folder)
    if data is None:
        source = os.path.join(folder, "pictures")
        _draw(source)
        if draw_only:
            typer.echo(f"{source} holds the pictures")
            return
    else:
        source = data
    source, val = find_parts(source, None)
    from dlio.data.reader import open_reader

    reader = open_reader(source)
    size = int(reader.sizes.sum())
    reader.close()
    nodes = min(2, ranks)
    prunes = find_spec("torch_pruning") is not None
    if not prunes:
        typer.echo("no neurons are pruned: that needs pip install 'dlio[prune]'")
    report = report or os.path.join(folder, "report.json")
    # The disk tier is of this run alone: it is to show how a tier fills.
    with TemporaryDirectory(prefix="tier-", dir=folder) as scratch:
        # Half of the data in RAM and the rest, with room to spare, on the disk: both work.
        ram = max(size // (2 * nodes) + 1, _LEAST_RAM)
        run(
            TrainConfig(
                source=source,
                val=val,
                epochs=epochs,
                image_size=image_size,
                pretend_nodes=nodes,
                tiers=f"ram:{ram}B,{scratch}:{size + (1 << 24)}B",
                report=report,
                prune="apoptosis" if prunes else "off",
                skip_samples=True,
            ),
            ranks,
        )
    typer.echo(f"The report as JSON: {report}")


def _make_folder(folder: str) -> None:
    if "," in folder:
        raise UsageError(f"--folder {folder}: a comma would end the tier's name; choose another")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--folder: {folder} cannot be made: {error.strerror}; choose a folder you may write"
        ) from error


def _draw(folder: str) -> None:
    from rich.progress import Progress

    from dlio.cli.demo_pictures import draw_dataset, is_complete

    if is_complete(folder):
        return
    with Progress(transient=True) as bar:
        task = bar.add_task("drawing pictures", total=None)
        draw_dataset(folder, progress=lambda done, of: bar.update(task, completed=done, total=of))
