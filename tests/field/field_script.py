"""A script of another project, and the way it is run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FieldScript:
    """A script of another project, and the way it is run."""

    name: str
    repository: str
    """As `owner/name` on GitHub."""
    commit: str
    """The commit of which the results in the documentation are."""
    path: str
    """Path of the script in the repository."""
    arguments: tuple[str, ...]
    make_inputs: Callable[[str], None]
    """Makes the script's data, seen from the folder in which it runs; `../data` may be used."""
    folder: str = ""
    """Folder of the repository that is copied and in which the script runs; that of the script by
    default."""
    options: tuple[str, ...] = ()
    """Options of `dlio run` that the script needs."""
    times: str = r"(?!)"
    """Regular expression of printed times; they are not compared."""
    check_steps: int = 3
    """Steps of `dlio run --check`; 0 for none."""
    environment: Mapping[str, str] = field(default_factory=dict)
