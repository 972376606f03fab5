"""`dlio pack`: write a data set as few large files, in a shuffled order."""

import json
import os
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from dlio.errors import UsageError
from dlio.util.cores import available_cores
from dlio.util.files import check_writable, write_json
from dlio.util.units import format_bytes, parse_bytes
from dlio_staging.packing import Packed, describe, pack, tell
from dlio_staging.packplan import PackOptions

__all__ = ["PackOptions", "Packed", "command", "pack"]


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A data set of any format.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder to write.")],
    format_: Annotated[
        Literal["native", "tar", "hdf5", "zarr"], typer.Option("--format", help="To write.")
    ] = "native",
    order: Annotated[
        Literal["shuffled", "source"], typer.Option(help="Of samples in the files.")
    ] = "shuffled",
    compress: Annotated[
        Literal["auto", "lz4", "none"], typer.Option(help="auto leaves images as they are.")
    ] = "auto",
    shard_size: Annotated[str, typer.Option(help="Of one file, about.")] = "1GiB",
    seed: Annotated[int, typer.Option(help="Of the shuffled order, and of --split.", min=0)] = 0,
    resize: Annotated[
        int | None, typer.Option(help="Short side of images, in pixels; none grows.", min=1)
    ] = None,
    quality: Annotated[int, typer.Option(help="Of JPEGs that are resized.", min=1, max=100)] = 90,
    restart_rows: Annotated[
        bool,
        typer.Option(help="Have JPEGs restart at rows, losslessly, where jpegtran is installed."),
    ] = True,
    split: Annotated[
        str | None, typer.Option(help="Several data sets, as train=0.9,val=0.1.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes; by default one a core.", min=1)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written.")] = False,
    report: Annotated[str | None, typer.Option(help="Write JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End in one line of JSON.")] = False,
) -> None:
    """Write a data set as few large files, checked, in a shuffled order.

    DST appears complete, or not at all. Interrupted, it goes on where it was when it is run again.
    Alone, or under mpirun or srun: each rank writes files of its own.
    """
    from dlio.comm import world
    from dlio_staging.progress import show_progress

    if report is not None:
        check_writable("--report", report)
    limit = parse_bytes(shard_size)
    if limit < 1 << 16:
        raise UsageError(f"--shard-size {shard_size}: give at least 64KiB")
    options = PackOptions(
        format=format_,
        order=order,
        compress=compress,
        shard_bytes=limit,
        seed=seed,
        resize=resize,
        quality=quality,
        restart_rows=restart_rows,
        split=_parse_split(split),
        workers=workers or available_cores(),
    )
    if dry_run:
        _tell_plan(source, destination, options)
        return
    rank = world().rank
    with show_progress(1, rank == 0, "packing") as show:
        scale: list[int] = []

        def progress(done: int, total: int) -> None:
            if not scale:
                scale.append(total)
                show.total(total)
            show(done)

        done = pack(source, destination, progress=progress, options=options)
    if rank:
        return
    typer.echo(tell(destination, done))
    told = {"source": source, "destination": destination, **asdict(options), **asdict(done)}
    if report is not None:
        write_json(report, told)
    if as_json:
        typer.echo(json.dumps(told))


def _parse_split(text: str | None) -> tuple[tuple[str, float], ...]:
    if text is None:
        return ()
    parts = []
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        try:
            parts.append((name, float(share)))
        except ValueError:
            raise UsageError(f"--split {text}: write train=0.9,val=0.1") from None
    return tuple(parts)


def _tell_plan(source: str, destination: str, options: PackOptions) -> None:
    told = describe(source, options)
    for part in told["parts"]:
        typer.echo(
            f"{os.path.join(destination, part['name'])}: {part['samples']:,} samples, "
            f"{format_bytes(part['bytes'])} to read, in {part['shards']} shard(s) of "
            f"{options.format}"
        )
    typer.echo("nothing was written")
