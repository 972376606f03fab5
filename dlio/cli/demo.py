"""`dlio demo`: train on two pretended nodes, with pictures that it draws or with your own."""

import os
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Annotated, Final

from dlio.errors import UsageError
from dlio.util.extras import how_to_install
from dlio.util.options import Option, check
from dlio.util.units import counted
from dlio.util.user_folders import make_folders

_LEAST_RAM: Final = 1 << 20
"""Minimum size of the RAM tier in bytes: a tier holds whole blocks."""
_EPOCHS: Final = 12
_LEAST_EPOCHS: Final = 3
"""The first one and the last see all samples; one between them leaves out those that are learnt."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of `dlio demo`."""

    data: Annotated[
        str | None,
        Option(
            "Your own images: class folders, or a folder with train/ and val/.",
            metavar="PATH",
            default_text="pictures that the demo draws",
        ),
    ] = None
    ranks: Annotated[
        int, Option("Number of ranks to start on this machine.", short="-n", least=1)
    ] = 2
    epochs: Annotated[
        int | None,
        Option(
            "Number of passes over the data.",
            least=1,
            default_text=f"{_EPOCHS}; of more images than it draws down to {_LEAST_EPOCHS}",
        ),
    ] = None
    image_size: Annotated[int, Option("Side of the square crops.", unit="pixels", least=32)] = 64
    folder: Annotated[
        str, Option("Folder for the pictures, the disk tier and the report.", metavar="FOLDER")
    ] = os.path.join(".cache", "dlio-demo")
    report: Annotated[
        str | None,
        Option(
            "Write the report as JSON to this file.",
            metavar="FILE",
            default_text="report.json in --folder",
        ),
    ] = None
    draw_only: Annotated[bool, Option("Draw the pictures and stop.")] = False

    def __post_init__(self) -> None:
        check(self)
        if "," in self.folder:
            raise UsageError(
                f"--folder {self.folder}: a comma separates tiers; choose a folder without one"
            )


def command(demo: DemoOptions) -> None:
    """Train on a small data set with 2 ranks, in less than three minutes.

    That is on two cores. The ranks pretend to be two nodes, each with a RAM tier and a disk tier,
    and shuffle samples between them. During training, neurons are pruned and samples that the
    network has learnt are skipped.
    """
    try:
        os.close(make_folders(demo.folder))
    except OSError as error:
        raise UsageError(
            f"--folder {demo.folder}: cannot be created: {error.strerror}; choose a writable folder"
        ) from error
    source = demo.data
    if source is None:
        source = os.path.join(demo.folder, "pictures")
        _draw(source)
        if demo.draw_only:
            print(f"{source} holds the pictures")
            return
    report = demo.report or os.path.join(demo.folder, "report.json")
    _train(demo, source, report)
    print(f"The report as JSON: {report}")


def _train(demo: DemoOptions, data: str, report: str) -> None:
    from dlio.cli.train_command import find_parts, run
    from dlio.data.reader import open_reader
    from dlio.train.config import TrainConfig, train_config
    from dlio.util.options import options_of

    source, val = find_parts(data, None)
    with closing(open_reader(source)) as reader:
        size, samples = int(reader.sizes.sum()), len(reader)
    nodes = min(2, demo.ranks)
    # Features may not be installed.
    known = {each.name for each in options_of(TrainConfig)}
    less_work: dict[str, object] = {"prune": "apoptosis", "skip_samples": True}
    if find_spec("torch_pruning") is None:
        less_work["prune"] = "off"
        print(f"neurons are not pruned: {how_to_install('prune')} adds pruning")
    # A new disk tier in every run, so that the demo shows how a tier fills.
    with TemporaryDirectory(prefix="tier-", dir=demo.folder) as scratch:
        # Half of the data fits into RAM and the rest goes to the disk tier, so both are used.
        ram = max(size // (2 * nodes) + 1, _LEAST_RAM)
        config = train_config(
            source=source,
            val=val,
            epochs=demo.epochs or _passes(samples),
            image_size=demo.image_size,
            pretend_nodes=nodes,
            # Otherwise the homes of blocks, which depend on the files' times and the host's name,
            # say which rank normalises which samples together.
            shuffle="global",
            tiers=f"ram:{ram}B,{scratch}:{size + (1 << 24)}B",
            report=report,
            **{name: value for name, value in less_work.items() if name in known},
        )
        run(config, demo.ranks)


def _passes(samples: int) -> int:
    """Return a number of passes that take about as long as those over the drawn pictures; say so
    where that cannot be."""
    from dlio.cli.demo_pictures import IMAGES

    passes = min(_EPOCHS, max(_LEAST_EPOCHS, _EPOCHS * IMAGES // samples))
    times = passes * samples / (_EPOCHS * IMAGES)
    if times >= 2:
        print(
            f"{passes} passes over {counted(samples, 'image')} take about {times:.0f} times as "
            "long as the demo with its own pictures: --data takes a smaller folder, too"
        )
    return passes


def _draw(folder: str) -> None:
    from dlio.cli.demo_pictures import draw_dataset, is_complete
    from dlio.util.progress_bar import ProgressBar

    if is_complete(folder):
        return
    with ProgressBar("drawing pictures", transient=True) as bar:
        draw_dataset(folder, progress=lambda done, total: bar.update(done, total=total))
