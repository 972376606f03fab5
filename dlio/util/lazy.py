"""Public names of a package that are imported on first use, so that the package itself is light."""

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(places: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package, from the full name of each public name's module."""

    def find(name: str) -> object:
        if name not in places:
            raise AttributeError(f"no attribute {name!r}")
        return getattr(import_module(places[name]), name)

    return find
