"""`dlio ls`: what is at a path."""

import json
from typing import Annotated, Any

import typer

from dlio.units import format_bytes

_ONE_SIDED = 2.0


def describe(path: str) -> dict[str, Any]:
    """What the data set at `path` is. Raises SourceError when it is none.

    `class_mix` compares its blocks with a random choice of as many samples: the mean, over
    blocks, of the most frequent class's count, divided by what chance gives. 1 is well mixed;
    sorted data is far above.
    """
    import numpy as np

    from dlio.reader import open_reader

    reader = open_reader(path)
    layout = reader.layout
    counts = np.bincount(reader.labels, minlength=len(reader.classes))
    chosen = np.unique(np.linspace(0, layout.blocks - 1, 64).astype(np.int64))
    blocks = [reader.labels[layout.samples_of(int(block))] for block in chosen]
    generator = np.random.default_rng(0)
    by_chance = [reader.labels[generator.integers(0, len(reader), len(b))] for b in blocks]

    def most_frequent(samples: Any) -> float:
        return float(np.mean([np.bincount(each).max() for each in samples]))

    return {
        "path": path,
        "format": reader.format,
        "samples": len(reader),
        "bytes": int(reader.sizes.sum()),
        "schema": [list(field) for field in reader.schema.fields],
        "classes": dict(zip(reader.classes, counts.tolist(), strict=False)),
        "blocks": layout.blocks,
        "block_bytes": int(reader.sizes.sum()) // layout.blocks,
        "class_mix": most_frequent(blocks) / most_frequent(by_chance),
        "fingerprint": reader.fingerprint,
    }


def command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A data set.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a data set holds and how it is cut into blocks."""
    found = describe(path)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    counts = found["classes"]
    schema = ", ".join(f"{name}: {kind}" for name, kind in found["schema"])
    typer.echo(
        f"{path}: {found['format']}, {found['samples']:,} samples, {format_bytes(found['bytes'])}"
    )
    typer.echo(f"  fields       {schema}")
    if counts:
        names = list(counts)
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        typer.echo(f"  classes      {len(names)}: {shown}")
        typer.echo(f"  per class    {min(counts.values()):,} to {max(counts.values()):,} samples")
    typer.echo(f"  blocks       {found['blocks']:,} of about {format_bytes(found['block_bytes'])}")
    typer.echo(f"  fingerprint  {found['fingerprint']}")
    if found["class_mix"] > _ONE_SIDED:
        typer.echo(
            f"warning: blocks are one-sided (class mix {found['class_mix']:.1f}, 1 is well mixed), "
            "which makes each node's batches one-sided too: write it in a shuffled order with "
            "`dlio pack`"
        )
