"""Splits that the README of a repository of Hugging Face's Hub names.

Its head, between two lines `---`, is YAML. `configs:` lists data sets, and `data_files:` of each
its splits with their files: `- split: train`, `path: data/alpha.parquet`.
"""

from typing import Final

from dlio.data.source import Source, expand, inside
from dlio.errors import DlioError
from dlio.util.structured_text import YamlValue, parse_yaml

_README: Final = "README.md"
_MOST_BYTES: Final = 1 << 16
_FENCE: Final = b"---"


def words_of_splits(url: str) -> str:
    """Return the words about several splits that a folder's README names and that are there, with
    the files to open in place of all; "" without such."""
    source = Source(url)
    if not Source(inside(url, _README)).exists():  # Without a listing, which may be long.
        return ""
    try:
        lines = source.read(_README, 0, _MOST_BYTES).splitlines()
        if _FENCE not in lines[1:] or lines[0] != _FENCE:
            return ""
        card = parse_yaml(b"\n".join(lines[1 : lines.index(_FENCE, 1)]), _README, _MOST_BYTES)
    except DlioError:
        return ""  # It is text for people: other tools go on without it as well.
    splits = {name: path for name, path in _splits(card) if _is_there(url, path)}
    if len(splits) < 2:
        return ""
    shown = ", ".join(f"{name} ({path})" for name, path in splits.items())
    first = inside(url, next(iter(splits.values())))
    return (
        f"{inside(url, _README)} names the splits {shown}, which are read as one data set: open "
        f"the files of one, as in {first!r}"
    )


def _splits(card: YamlValue | None) -> list[tuple[str, str]]:
    """(split, its first path) of the first configuration that has several."""
    configs = card.get("configs") if isinstance(card, dict) else None
    for config in configs if isinstance(configs, list) else []:
        files = config.get("data_files") if isinstance(config, dict) else None
        named_splits = []
        for each in files if isinstance(files, list) else []:
            split, path = (
                (each.get("split"), each.get("path")) if isinstance(each, dict) else (0, 0)
            )
            path = path[0] if isinstance(path, list) and path else path
            if isinstance(split, str) and isinstance(path, str):
                named_splits.append((split, path))
        if len(named_splits) > 1:
            return named_splits
    return []


def _is_there(url: str, path: str) -> bool:
    """True if files of the folder match a path; one that leads out of it is none."""
    try:
        place = inside(url, path)
        return ".." not in path.split("/") and all(Source(p).exists() for p in expand(place))
    except DlioError:
        return False
