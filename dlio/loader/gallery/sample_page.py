"""A page of samples: whole pictures, and the crops that the loader makes of them.

The page is one file that fetches nothing: pictures are data URIs, and all text of the data set is
escaped. It needs no script.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.reader_contract import SampleName, data_bytes
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError
from dlio.image.decoder import Decoder, decode_whole
from dlio.loader.gallery.value_html import figure, named_values, rows_of, shortened, value_html
from dlio.loader.picture_targets import Companion
from dlio.loader.recipe import CropRecipe, Recipe
from dlio.loader.sample_recipes import MappedRecipe
from dlio.util.printable import as_html
from dlio.util.units import counted, format_bytes
from dlio.util.whole_files import write_whole

HEAD: Final = """<style>
.dlio { --ink: #1d2330; --soft: #667085; --line: #e3e6ec; --paper: #f6f7f9; --card: #fff;
  --accent: #3f51b5; font: 14px/1.45 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); padding: 20px 28px; box-sizing: border-box; }
@media (prefers-color-scheme: dark) { .dlio { --ink: #e6e8ee; --soft: #98a1b3; --line: #323846;
  --paper: #14171d; --card: #1c2028; --accent: #9fa8ff; } }
.dlio-page { margin: 0; background: #f6f7f9; }
@media (prefers-color-scheme: dark) { .dlio-page { background: #14171d; } }
.dlio h1 { font-size: 20px; margin: 0 0 8px; overflow-wrap: anywhere; }
.dlio h2 { font-size: 14px; margin: 0 0 10px; overflow-wrap: anywhere; }
.dlio h2 small { font-weight: normal; font-size: 13px; color: var(--soft); }
.dlio i, .dlio figcaption, .dlio th { color: var(--soft); font-style: normal; }
.dlio code { font: 12px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
.dlio table { border-collapse: collapse; background: none; margin: 0; }
.dlio th { font-weight: normal; text-align: left; vertical-align: top; padding: 2px 16px 2px 0;
  white-space: nowrap; }
.dlio td { padding: 2px 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
.dlio tr { background: none; }
.dlio .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px; margin: 14px 0; }
.dlio .row, .dlio .crops { display: flex; flex-wrap: wrap; gap: 14px; align-items: flex-start; }
.dlio .crops { flex: 1 1 240px; }
.dlio figure { margin: 0; max-width: 100%; flex: none; }
.dlio figcaption { font-size: 12px; margin-top: 4px; }
.dlio .stack { position: relative; line-height: 0; max-width: 100%; overflow: hidden;
  border-radius: 4px; }
.dlio .stack img { width: 100%; display: block; margin: 0; image-rendering: auto; }
.dlio .stack .mask, .dlio .stack svg { position: absolute; left: 0; top: 0; width: 100%;
  height: 100%; }
.dlio .stack .mask { image-rendering: pixelated; }
.dlio .stack rect { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
.dlio .stack rect.part { stroke: #fff; stroke-dasharray: 6 4; }
.dlio .stack text.part { fill: #fff; font-weight: 400; }
.dlio .stack circle { stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.dlio .stack text { font-family: system-ui, sans-serif; font-weight: 600; paint-order: stroke;
  stroke: #000c; stroke-width: 3px; vector-effect: non-scaling-stroke; }
.dlio .plot polyline { fill: none; stroke: var(--accent); stroke-width: 1.5; }
.dlio .about, .dlio .fields { margin-top: 10px; }
.dlio .error { color: #d92d20; margin: 0; }
.dlio .marks { margin-top: 10px; display: flex; gap: 16px; }
.dlio:has(.show-boxes:not(:checked)) .box, .dlio:has(.show-masks:not(:checked)) .stack .mask,
.dlio:has(.show-keypoints:not(:checked)) .keypoint { display: none; }
.dlio .bars td, .dlio .bars th { padding: 1px 10px 1px 0; vertical-align: middle; }
.dlio .bars .bar { width: 420px; max-width: 50vw; }
.dlio .bars .bar div { height: 12px; background: var(--accent); border-radius: 2px; }
.dlio .bars .number { text-align: right; font-variant-numeric: tabular-nums; }
.dlio h3 { font-size: 14px; margin: 0 0 8px; }
</style>"""
"""The style of pages: one look for light and dark screens, limited to dlio's own part."""
_MOST_NAMES: Final = 30
"""Names of classes that the head of a page shows."""
_Part = tuple[str, tuple[float, float, float, float]]
"""(name, (left, top, width, height)) of a crop, in pixels of the picture."""


@dataclass(frozen=True, slots=True)
class SamplePage:
    """A page of HTML, which notebooks show by themselves; texts in it are escaped."""

    title: str
    body: str = field(repr=False)
    failed: tuple[str, ...] = ()
    """Errors of the samples that could not be shown."""

    @property
    def html(self) -> str:
        """The whole page, as one file."""
        return (
            f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width">{HEAD}'
            f'<title>{as_html(self.title)}</title></head><body class="dlio-page">{self.body}'
            "</body></html>\n"
        )

    def _repr_html_(self) -> str:
        return HEAD + self.body

    def save(self, path: str, private: bool = False) -> None:
        """Write the page as a file, which `private` lets nobody else read.

        Raises UsageError if it cannot be written.
        """
        text = self.html.encode("utf-8", "replace")
        write_whole(path, lambda file: file.write(text), 0o600 if private else 0o664)


def make_page(
    recipe: Recipe,
    samples: Sequence[int],
    epochs: Sequence[int],
    read: Callable[[int], Buffer],
) -> SamplePage:
    """Return the page of some samples; a sample that cannot be read or decoded shows its error.

    Crops of `epochs` are shown; one is enough for samples that do not change.
    """
    reader = recipe.reader
    failed: list[str] = []
    cards = []
    for sample in samples:
        try:
            inner = _card(recipe, sample, epochs, read(sample))
        except (SourceError, CorruptBlock) as error:
            failed.append(str(error))
            inner = f'<p class="error">{shortened(str(error))}</p>'
        cards.append(
            f'<section class="card"><h2>{sample:,} <small>{shortened(reader.name(sample), 160)}'
            f"</small></h2>{inner}</section>"
        )
    marks = _toggles(recipe)
    body = f'<div class="dlio">{_head(recipe, len(samples))}{marks}{"".join(cards)}</div>'
    return SamplePage(f"{reader.path} - dlio view", body, tuple(failed))


def _head(recipe: Recipe, count: int) -> str:
    reader = recipe.reader
    names = [name for name in reader.classes if name]
    shown = ", ".join(shortened(name, 60) for name in names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        shown += f"&hellip; <i>and {len(names) - _MOST_NAMES:,} more</i>"
    rows = [
        ("format", shortened(reader.format)),
        ("samples", f"{len(reader):,}, of which {count:,} are shown"),
        ("bytes", format_bytes(data_bytes(reader))),
        ("fields", ", ".join(f"{shortened(n, 60)}: {k}" for n, k in reader.schema.fields)),
    ]
    if names:
        rows.append((f"{counted(len(names), 'class')}", shown))
    return f"<header><h1>{shortened(reader.path)}</h1>{_table(rows)}</header>"


def _toggles(recipe: Recipe) -> str:
    """Return boxes to tick that hide boxes, masks and keypoints; they work without a script."""
    kinds = recipe.reader.schema.kinds
    wanted = {"boxes": "boxes", "masks": "segments", "keypoints": "keypoints"}
    marks = [name for name, kind in wanted.items() if kind in kinds]
    if "mask" in kinds and "masks" not in marks and recipe.moves:
        marks.append("masks")
    inputs = "".join(
        f'<label><input type="checkbox" class="show-{name}" checked> {name}</label>'
        for name in marks
    )
    return f'<nav class="marks">{inputs}</nav>' if inputs else ""


def _table(rows: Sequence[tuple[str, str]]) -> str:
    inner = "".join(f"<tr><th>{as_html(name)}</th><td>{text}</td></tr>" for name, text in rows)
    return f'<table class="about">{inner}</table>' if inner else ""


def _card(recipe: Recipe, sample: int, epochs: Sequence[int], payload: Buffer) -> str:
    """Return the inner HTML of a sample. Raises SourceError, CorruptBlock."""
    companion = recipe.companion
    if companion is None:
        return _fields(recipe.one(epochs[0], sample, payload))
    name = SampleName(recipe.reader, sample)
    values = recipe.fields(sample, payload)
    pixels = decode_whole(values[companion.image], name)
    own = recipe.accompanying(values, None, sample)
    classes = recipe.reader.classes
    parts = [part for epoch in epochs for part in _parts(recipe, epoch, sample, values)]
    figures = [figure(pixels, "whole picture", own, classes, parts if recipe.is_random else ())]
    changes = recipe.crops or recipe.transform is not None or isinstance(recipe, MappedRecipe)
    made = [
        _made(recipe, epoch, sample, payload, companion, classes)
        for epoch in (epochs if changes else ())
    ]
    rows = rows_of(own, classes) if companion.is_class or recipe.moves else []
    crops = f'<div class="crops">{"".join(made)}</div>' if made else ""
    return f'<div class="row">{"".join(figures)}{crops}</div>{_table(rows)}'


def _parts(recipe: Recipe, epoch: int, sample: int, values: dict[str, Any]) -> list[_Part]:
    """Return the parts of a picture that its crops show; none if samples are not crops."""
    if not isinstance(recipe, CropRecipe) or recipe.decoder.kept:
        return []
    crop, seed = replace(recipe.crop, crops=1), recipe.decoder.seed
    out, name = np.empty(crop.shape, np.uint8), SampleName(recipe.reader, sample)
    uniforms = recipe.decoder.draw(epoch, np.array([sample], np.int64))
    parts: list[_Part] = []
    for k, row in enumerate(uniforms.reshape(recipe.crop.crops, -1), 1):
        shown = Decoder(crop, seed).decode(values[recipe.companion.image], name, row, out)
        if shown is not None:
            caption = f"epoch {epoch}" + (f", crop {k}" if recipe.crop.crops > 1 else "")
            box = shown.box
            parts.append((caption, (box.left, box.top, box.width, box.height)))
    return parts


def _made(
    recipe: Recipe,
    epoch: int,
    sample: int,
    payload: Buffer,
    companion: Companion,
    classes: Sequence[str],
) -> str:
    made = recipe.one(epoch, sample, payload)
    caption = f"epoch {epoch}" if recipe.is_random else "as loaded"
    image, own = made, None
    if isinstance(made, tuple) and len(made) == 2:
        image, own = made
    elif isinstance(made, dict) and companion.image in made:
        image = made[companion.image]
    pixels = _pixels(image)
    if pixels is None:
        return f"<div><i>{as_html(caption)}</i><br>{value_html(made)}</div>"
    return figure(pixels, caption, own, classes)


def _pixels(image: Any) -> npt.NDArray[Any] | None:
    """Return an image tensor as an array of shape (height, width, 3) or (height, width); several
    crops side by side."""
    if isinstance(image, torch.Tensor) and image.ndim == 4:
        image = torch.cat(list(image), dim=-1)
    if not isinstance(image, torch.Tensor) or image.ndim != 3 or image.shape[0] not in (1, 3):
        return None
    plain = image.detach().cpu()
    array = (plain.float() if plain.dtype == torch.bfloat16 else plain).permute(1, 2, 0).numpy()
    return array[..., 0] if array.shape[2] == 1 else array


def _fields(sample: Any) -> str:
    """Return the fields of a sample that is not a picture with its companion."""
    rows = named_values(sample if isinstance(sample, dict | tuple | list) else [sample])
    return f'<table class="fields">{rows}</table>'
