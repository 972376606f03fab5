"""`dlio bench peers`: environments of the libraries that dlio is compared with."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dlio.errors import UsageError
from dlio.util.options import Option, check
from dlio_bench.peers.environments import folder, install, missing
from dlio_bench.peers.table import ENVIRONMENTS

__all__ = ["Peers", "command"]


@dataclass(frozen=True, slots=True)
class Peers:
    """Environments to make or to list."""

    action: Annotated[
        Literal["install", "list"],
        Option("install: make the environments. list: show which there are.", positional=True),
    ]
    names: Annotated[
        tuple[str, ...],
        Option(
            f"Environments, of {', '.join(ENVIRONMENTS)}, or all of them if none is named.",
            positional=True,
            metavar="NAME",
        ),
    ] = ()

    def __post_init__(self) -> None:
        check(self)
        if unknown := [name for name in self.names if name not in ENVIRONMENTS]:
            raise UsageError(f"{unknown[0]}: choose among {', '.join(ENVIRONMENTS)}")


def command(peers: Peers) -> None:
    """Install the libraries that `dlio bench loader --peers` measures.

    Each gets an environment of its own in dlio's cache folder; the environment of dlio stays as it
    is. Goes on after a library that cannot be installed, and ends with exit code 2 then.
    """
    failed = []
    for name in peers.names or tuple(ENVIRONMENTS):
        if peers.action == "install":
            print(f"{name}: installing {ENVIRONMENTS[name].library}", flush=True)
            try:
                install(name)
            except UsageError as error:
                failed.append(name)
                print(f"{name}: {error}")
                continue
        print(f"{name}: {missing(name) or folder(name)}")
    if failed:
        raise UsageError(f"not installed: {', '.join(failed)}; the reasons are above")
