"""OME-Zarr: images in levels of resolution, labels next to them, wells of a plate; 0.4 and 0.5.

    image.zarr/{0,1,2}                 levels, which `multiscales` name
    image.zarr/labels/nuclei/{0,1,2}   masks of the same levels
    plate.zarr/A/1/0/{0,1,2}           row, column, field of view

A sample is an image at its full resolution. Source: https://ngff.openmicroscopy.org/0.5/.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from dlio.errors import SourceError
from dlio.util.units import counted

ZarrGroup: TypeAlias = Any
"""A group of zarr, whose attributes are of any type."""
ZarrArray: TypeAlias = Any
_MOST_IMAGES: Final = 1 << 16
_LABELS: Final = "labels"
_BIOFORMATS: Final = "bioformats2raw.layout"


def ome_images(root: ZarrGroup, where: str) -> dict[str, dict[str, ZarrArray]]:
    """Return the images of a group by their paths in it, as arrays by field; {} if it has none.

    `image` is the first level, `label` that of the only mask; several masks have their own names.

    Raises SourceError for metadata that name missing parts.
    """
    if not hasattr(root, "groups"):
        return {}
    images = {path: _fields(_group(root, path, where), where) for path in _paths(root, where)}
    fields = {tuple(each) for each in images.values()}
    if len(fields) > 1:
        first, other = (", ".join(each) for each in sorted(fields)[:2])
        raise SourceError(f"{where}: some images have {first}, others {other}: open them alone")
    return images


def _paths(root: ZarrGroup, where: str) -> list[str]:
    about = _about(root)
    if "multiscales" in about:
        return [""]
    if "plate" in about:
        wells = _listed(about["plate"], "wells", where)
        fields = [
            (well, _listed(_about(_group(root, well, where)).get("well"), "images", where))
            for well in wells
        ]
        paths = [f"{well}/{field}" for well, inner in fields for field in inner]
    elif "well" in about:
        paths = _listed(about["well"], "images", where)
    elif _BIOFORMATS in about:
        names = [name for name, group in root.groups() if "multiscales" in _about(group)]
        paths = sorted(names, key=lambda name: (len(name), name))
    else:
        return []
    if len(paths) > _MOST_IMAGES:
        raise SourceError(
            f"{where} has {counted(len(paths), 'image')}, over {_MOST_IMAGES}: open a well"
        )
    return paths


def _about(group: ZarrGroup) -> Mapping[str, Any]:
    """Return the metadata of OME, which are attributes in 0.4 and below `ome` in 0.5."""
    plain = dict(group.attrs)
    inner = plain.get("ome")
    return inner if isinstance(inner, Mapping) else plain


def _listed(about: object, key: str, where: str) -> list[str]:
    """Return the paths of a list of metadata. Raises SourceError if they lead elsewhere."""
    rows = about.get(key) if isinstance(about, Mapping) else None
    rows = rows if isinstance(rows, list) else []
    paths = [row.get("path") if isinstance(row, Mapping) else None for row in rows]
    named = [path for path in paths if isinstance(path, str)]
    if not named or len(named) < len(paths):
        raise SourceError(f"{where}: its metadata list no {key} with a path: correct them")
    if len(set(named)) < len(named):
        raise SourceError(f"{where}: its metadata list a path of its {key} twice: correct them")
    if any(part in ("", ".", "..") for path in named for part in path.split("/")):
        raise SourceError(f"{where}: a path of its {key} leads out of it: refused")
    return named


def _group(root: ZarrGroup, path: str, where: str) -> ZarrGroup:
    if not path:
        return root
    try:
        return root[path]
    except KeyError as error:
        raise SourceError(f"{where} lacks {path}, which its metadata name: copy it") from error


def _fields(image: ZarrGroup, where: str) -> dict[str, ZarrArray]:
    fields = {"image": _first_level(image, where)}
    if _LABELS not in image:
        return fields
    group = image[_LABELS]
    own = _about(group).get(_LABELS)
    names = [name for name in own if isinstance(name, str)] if isinstance(own, list) else []
    for name in dict.fromkeys(names):
        if name in ("", ".", "..") or "/" in name:
            raise SourceError(f"{where}: a name of its labels leads out of it: refused")
        mask = _first_level(_group(group, name, where), where)
        fields["label" if len(names) == 1 else name] = mask
    return fields


def _first_level(image: ZarrGroup, where: str) -> ZarrArray:
    scales = _about(image).get("multiscales")
    first = scales[0] if isinstance(scales, list) and scales else None
    level = _group(image, _listed(first, "datasets", where)[0], where)
    if not hasattr(level, "chunks"):
        raise SourceError(f"{where}: its first level is not an array: correct its metadata")
    return level
