"""`dlio view`: a page of samples for eyes."""

import os
import secrets
import sys
import tempfile
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from dlio.cli.option_groups import with_help
from dlio.errors import SourceError, UsageError
from dlio.util.options import CheckedOptions, Option
from dlio.util.printable import print_line
from dlio.util.units import counted
from dlio.util.whole_files import check_writable


@dataclass(frozen=True, slots=True)
class ViewOptions(CheckedOptions):
    """Options of `dlio view`."""

    source: Annotated[
        str, Option("Data set of any format: a path or a URL.", positional=True, metavar="SRC")
    ]
    count: Annotated[int, Option("Number of samples to show.", least=1, most=1000)] = 12
    crop: Annotated[
        int,
        Option(
            "Side of the crops in pixels, as of image_size=; 0 for whole pictures alone.", least=0
        ),
    ] = 224
    evaluation: Annotated[
        bool, Option("Show the middle of pictures, as train=False gives it.", name="eval")
    ] = False
    transform: Annotated[
        str | None,
        Option("Transform of your own, which replaces --crop and --eval.", metavar="MODULE:NAME"),
    ] = None
    epochs: Annotated[
        int, Option("Number of epochs whose random crops are shown.", least=1, most=100)
    ] = 2
    order: Annotated[
        Literal["shuffled", "source"],
        Option("Samples of a shuffled epoch, or the first ones of the source."),
    ] = "shuffled"
    seed: Annotated[int, Option("Seed of the order and of the crops.", least=0)] = 0
    output: Annotated[
        str | None,
        Option("File to write the page to.", metavar="FILE", default_text="a new file in /tmp"),
    ] = None
    no_browser: Annotated[bool, Option("Write the page, and open no browser.")] = False


@with_help(
    "dlio view /data/imagenet/train",
    "dlio view imagenet/train --count 30 --output page.html --no-browser",
)
def command(options: ViewOptions) -> None:
    """Show samples on a page: labels, boxes, masks and the loader's crops.

    The page is a single file that fetches nothing. Volumes are shown by their middle slices, and
    arrays as plots. Samples that cannot be read are shown with their errors.
    """
    from dlio.loader.dataset import open_dataset

    if options.output is not None:
        check_writable("--output", options.output)
    arguments: dict[str, Any] = {"image_size": options.crop or None}
    if options.transform is not None:
        arguments["transform"] = _imported(options.transform)
    with open_dataset(
        options.source,
        tiers="none",
        train=not options.evaluation,
        seed=options.seed,
        **arguments,
    ) as data:
        page = data.show(options.count, shuffle=options.order == "shuffled", epochs=options.epochs)
        shown = min(options.count, len(data))
    if len(page.failed) == shown:
        raise SourceError(page.failed[0])
    path = options.output
    if path is None:
        path = f"{tempfile.gettempdir()}/dlio-view-{secrets.token_hex(8)}.html"
    page.save(path, private=options.output is None)
    print_line(
        f"{path}: {counted(shown, 'sample')} of {options.source}, {os.path.getsize(path):,} bytes"
    )
    for error in page.failed[:5]:
        print_line(f"warning: {error}", sys.stderr)
    if not options.no_browser and not _opened(os.path.abspath(path)):
        print_line("no browser was found: open the file in one")


def _opened(path: str) -> bool:
    """Open a page; False without a screen, where a browser would take over the terminal."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    if sys.platform != "darwin" and not any(os.environ.get(name) for name in screens):
        return False
    return webbrowser.open(f"file://{path}")


def _imported(name: str) -> Callable[[Any], Any]:
    from dlio.train.factory import load_factory

    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise UsageError(f"--transform {name}: write it as MODULE:NAME")
    return load_factory("--transform", name)
