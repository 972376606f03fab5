"""`dlio bench peers`: environments of the libraries that dlio is compared with."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dlio.errors import UsageError
from dlio.util.options import Option, check
from dlio_bench.peers.contender_table import ENVIRONMENTS
from dlio_bench.peers.environments import folder, install, missing


@dataclass(frozen=True, slots=True)
class PeersChoice:
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
    archive: Annotated[
        str,
        Option(
            "Source of a library that no registry has, dlio_benchmark: an archive or a checkout.",
            metavar="FILE",
            default_text="none",
        ),
    ] = ""

    def __post_init__(self) -> None:
        check(self)
        if unknown := [name for name in self.names if name not in ENVIRONMENTS]:
            raise UsageError(f"{unknown[0]}: choose among {', '.join(ENVIRONMENTS)}")
        taking = [name for name, each in ENVIRONMENTS.items() if each.archive]
        if self.archive and (self.action, list(self.names)) not in [
            ("install", [name]) for name in taking
        ]:
            raise UsageError(f"--archive is for: dlio bench peers install {', '.join(taking)}")


def command(peers: PeersChoice) -> None:
    """Install the libraries that `dlio bench loader --peers` measures.

    Each gets an environment of its own in dlio's cache folder; the environment of dlio stays as it
    is. Goes on after a library that cannot be installed, and ends with exit code 2 then.
    """
    failed = []
    installing = peers.action == "install"
    every = [name for name, each in ENVIRONMENTS.items() if not (installing and each.archive)]
    for name in peers.names or every:
        if installing:
            print(f"{name}: installing {ENVIRONMENTS[name].library}", flush=True)
            try:
                install(name, peers.archive)
            except UsageError as error:
                failed.append(name)
                print(f"{name}: {error}")
                continue
        print(f"{name}: {missing(name) or folder(name)}")
    if failed:
        raise UsageError(f"not installed: {', '.join(failed)}; the reasons are above")
