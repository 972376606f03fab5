"""`dlio ls`: what is at a path."""

import json
from typing import Annotated, Any

import typer

from dlio.util.units import format_bytes

_ONE_SIDED = 2.0
_MOST_CLASSES = 1 << 20


def describe(path: str) -> dict[str, Any]:
    """What the data set at `path` is. Raises SourceError when it is none.

    `class_mix` compares its blocks with a random choice of as many samples: the mean, over
    blocks, of the most frequent class's count, divided by what chance gives. 1 is well mixed;
    sorted data is far above; None without classes.
    """
    import numpy as np

    from dlio.data.reader import data_bytes, open_reader
    from dlio.data.source import redact
    from dlio.storage.places import find_place

    reader = open_reader(path)
    layout = reader.layout
    size = data_bytes(reader)
    labels = reader.labels
    countable = len(labels) and labels.min() >= 0 and labels.max() < _MOST_CLASSES
    mix = None
    counts: dict[str, int] = {}
    if countable and (len(reader.classes) or labels.any()):
        counted = np.bincount(labels, minlength=len(reader.classes)).tolist()
        names = list(reader.classes) or [str(number) for number in range(len(counted))]
        counts = dict(zip(names, counted, strict=False))
        mix = _class_mix(labels, layout)
    place = find_place(reader.path if isinstance(path, str) else "/")
    return {
        "path": redact(str(path)),
        "format": reader.format,
        "samples": len(reader),
        "bytes": size,
        "schema": [list(field) for field in reader.schema.fields],
        "structure": reader.schema.structure,
        "classes": counts,
        "blocks": layout.blocks,
        "block_bytes": size // layout.blocks,
        "class_mix": mix,
        "storage": {
            "kind": place.kind,
            "stripe_count": place.stripe_count,
            "stripe_bytes": place.stripe_bytes,
        },
        "fingerprint": reader.fingerprint,
    }


def _class_mix(labels: Any, layout: Any) -> float:
    import numpy as np

    chosen = np.unique(np.linspace(0, layout.blocks - 1, 64).astype(np.int64))
    blocks = [labels[layout.samples_of(int(block))] for block in chosen]
    generator = np.random.default_rng(0)
    by_chance = [labels[generator.integers(0, len(labels), len(b))] for b in blocks]

    def most_frequent(samples: Any) -> float:
        return float(np.mean([np.bincount(each).max() for each in samples]))

    return most_frequent(blocks) / most_frequent(by_chance)


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
    storage = found["storage"]
    stripes = (
        f", {storage['stripe_count']} stripes of {format_bytes(storage['stripe_bytes'])}"
        if storage["stripe_bytes"]
        else ""
    )
    typer.echo(f"  storage      {storage['kind']}{stripes}")
    if found["class_mix"] is not None and found["class_mix"] > _ONE_SIDED:
        typer.echo(
            f"warning: blocks are one-sided (class mix {found['class_mix']:.1f}, 1 is well mixed), "
            "which makes each node's batches one-sided too: write it in a shuffled order with "
            "`dlio pack`"
        )
