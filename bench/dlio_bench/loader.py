"""`dlio bench loader`: loading alone, beside torch's DataLoader, under its ceiling."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from dlio.errors import UsageError
from dlio.files import write_json


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    source: str
    image_size: int = 224
    batch_size: int = 64
    workers: int = 2
    repeats: int = 5


def measure(case: Case) -> dict[str, Any]:
    """Passes over the data per contender, in turn within each repeat, after a warm-up of each.

    `dlio` reads from its RAM tier, which its warm-up fills; `torch` from the page cache, to uint8
    as dlio does; `torch_floats` ends in ToTensor, as most scripts do; `ceiling` decodes payloads
    that lie in memory, in as many threads, and does nothing else.
    Returns samples/s of each repeat, and ratios of the same repeat's.
    """
    import numpy as np

    import dlio
    from dlio.reader import open_reader
    from dlio_bench.machine import describe_machine, ratio, spread
    from dlio_bench.pillow import pillow_loader

    reader = open_reader(case.source)
    if reader.format != "folder":
        raise UsageError(f"{case.source} is packed: the yardstick reads class folders of images")
    yardsticks = {
        floats: pillow_loader(reader, case.image_size, case.batch_size, case.workers, floats)
        for floats in (False, True)
    }
    room = int(reader.sizes.sum() * 1.1) + (64 << 20)
    payloads = reader.read(np.arange(len(reader), dtype=np.int64))
    rates: dict[str, list[float]] = {
        "torch": [],
        "torch_floats": [],
        "dlio": [],
        "ceiling": [],
    }
    with (
        dlio.open(case.source, tiers=f"ram:{room}B", image_size=case.image_size) as data,
        dlio.DataLoader(data, case.batch_size, shuffle=True, num_workers=case.workers) as loader,
    ):

        def bare() -> int:
            return _decode_all(data, payloads, case)

        contenders: dict[str, Callable[[], int]] = {
            "torch": lambda: sum(len(images) for images, _ in yardsticks[False]),
            "torch_floats": lambda: sum(len(images) for images, _ in yardsticks[True]),
            "dlio": lambda: sum(len(images) for images, _ in loader),
            "ceiling": bare,
        }
        for repeat in range(case.repeats + 1):
            for name, run in contenders.items():
                started = time.perf_counter()
                count = run()
                seconds = time.perf_counter() - started
                assert count == len(reader)
                if repeat:
                    rates[name].append(count / seconds)
        stats = loader.stats()
    reader.close()
    return {
        "benchmark": "loader",
        "case": asdict(case),
        "samples": len(reader),
        "bytes": int(reader.sizes.sum()),
        "samples_per_s": {
            name: {**spread(values), "all": values} for name, values in rates.items()
        },
        "dlio_over_torch": ratio(rates["dlio"], rates["torch"]),
        "dlio_over_torch_floats": ratio(rates["dlio"], rates["torch_floats"]),
        "dlio_over_ceiling": ratio(rates["dlio"], rates["ceiling"]),
        "dlio_bytes_of_last_pass": stats["bytes"],
        "machine": describe_machine(
            ("dlio", "torch", "numpy", "pillow", "simplejpeg", "opencv-python-headless")
        ),
    }


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Class folders of images.")],
    image_size: Annotated[int, typer.Option(help="Side of the crops.", min=1)] = 224,
    batch_size: Annotated[int, typer.Option(help="Samples of a batch.", min=1)] = 64,
    workers: Annotated[int, typer.Option(help="Threads here, processes there.", min=1)] = 2,
    repeats: Annotated[int, typer.Option(help="Timed passes each.", min=1)] = 5,
    report: Annotated[str | None, typer.Option(help="Write JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End in one line of JSON.")] = False,
) -> None:
    """Loading alone: dlio from its RAM tier, torch's DataLoader with Pillow, and the ceiling, a
    bare decoding loop. RandomResizedCrop and flip, without normalisation; torch once to uint8, as
    dlio, and once with ToTensor, as most scripts."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    found = measure(Case(source, image_size, batch_size, workers, repeats))
    table = Table(
        title=f"{found['samples']:,} images to {image_size} pixels, {workers} workers, "
        f"median of {repeats} (min to max)",
        box=SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("loader")
    table.add_column("samples/s", justify="right")
    names = {
        "torch": "torch DataLoader, Pillow, uint8, processes",
        "torch_floats": "torch DataLoader, Pillow, ToTensor, processes",
        "dlio": "dlio.DataLoader, RAM tier, threads",
        "ceiling": "ceiling: decode loop alone, threads",
    }
    for key, name in names.items():
        rate = found["samples_per_s"][key]
        table.add_row(name, f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})")
    Console().print(table)
    for key, words in (
        ("dlio_over_torch", "torch"),
        ("dlio_over_torch_floats", "torch with ToTensor"),
        ("dlio_over_ceiling", "the ceiling"),
    ):
        value = found[key]
        typer.echo(
            f"dlio / {words}: {value['median']:.2f} ({value['min']:.2f} to {value['max']:.2f})"
        )
    if report is not None:
        write_json(report, found)
    if as_json:
        typer.echo(json.dumps(found))


def _decode_all(data: Any, payloads: list[Any], case: Case) -> int:
    """Decode every payload once, in `workers` threads, into the same few slots."""
    import numpy as np

    reader = data.reader
    samples = np.arange(len(reader), dtype=np.int64)
    uniforms = data.decoder.draw(0, samples)
    counts = [0] * case.workers

    def work(first: int) -> None:
        out = np.empty((case.image_size, case.image_size, 3), np.uint8)
        for sample in range(first, len(payloads), case.workers):
            image = reader.schema.split(payloads[sample])["image"]
            data.decoder.decode(image, reader.name(sample), uniforms[sample], out)
            counts[first] += 1

    threads = [threading.Thread(target=work, args=(k,)) for k in range(case.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)
