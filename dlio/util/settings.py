"""Settings from the environment: every `DLIO_*` variable that a user may set.

Each variable is defined once, as a field of `Settings`: name, type, default, unit and help. All
code reads `settings()`, and the reference in the documentation is generated from `SETTINGS`.
"""

import difflib
import functools
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Final

from dlio.errors import UsageError

Value = float | int | bool | str | None
"""Types that a setting may have."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable of the environment."""

    name: str
    """Name of the variable, as in `DLIO_TIMEOUT`."""
    type: str
    """Type as shown to users: `number`, `integer`, `0 or 1`, `text`."""
    default: Value
    """Value when the variable is not set."""
    help: str
    """Description of the variable, one sentence."""
    remedy: str
    """End of an error message, which names valid values."""
    parse: Callable[[str], Value]
    """Converts the text of the variable; raises ValueError for an invalid one."""
    unit: str | None = None
    """Unit of the value, such as `seconds`."""
    default_text: str | None = None
    """Description of the default if it depends on the machine."""

    def read(self, text: str | None) -> Value:
        """Parse a text; return the default for None and for an empty text.

        Raises UsageError for an invalid text.
        """
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise UsageError(f"{self.name}={text}: {self.remedy}") from None


def _between(
    least: float, most: float = math.inf, *, open_end: bool = False
) -> Callable[[str], float]:
    """Return a parser of numbers from `least` to `most`; with `open_end`, above `least`."""

    def parse(text: str) -> float:
        value = float(text)
        if not least <= value <= most or (open_end and value == least) or math.isinf(value):
            raise ValueError(text)
        return value

    return parse


def _positive_integer(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _zero_or_one(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _setting(name: str, kind: str, default: Value, *rest: Any, **more: Any) -> Any:
    """Return a dataclass field of `Settings` for a variable; arguments are those of `Setting`."""
    setting = Setting(name, kind, default, *rest, **more)
    return field(default=default, metadata={"setting": setting})


def _seconds(name: str, default: float, text: str) -> Any:
    remedy = "give seconds above 0, such as 300"
    parse = _between(0, open_end=True)
    return _setting(name, "number", default, text, remedy, parse, "seconds")


def _switch(name: str, text: str, default: bool = False) -> Any:
    remedy = "give 1 for yes or 0 for no"
    return _setting(name, "0 or 1", default, text, remedy, _zero_or_one)


def _text(name: str, text: str, default_text: str) -> Any:
    return _setting(name, "text", None, text, "", str, default_text=default_text)


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of all variables, parsed and checked; see `settings`."""

    timeout_s: float = _seconds(
        "DLIO_TIMEOUT",
        300.0,
        "Deadline of every wait for another rank or for the source.",
    )
    peer_timeout_s: float = _seconds(
        "DLIO_PEER_TIMEOUT",
        30.0,
        "Time that a rank waits for samples of a peer before it reads them from the source.",
    )
    fill_timeout_s: float = _seconds(
        "DLIO_FILL_TIMEOUT",
        60.0,
        "Time that a rank waits for a block that another process is writing into a tier before it "
        "reads the sample from the source.",
    )
    checked_share: float = _setting(
        "DLIO_CHECK",
        "number",
        1.0,
        "Share of the payloads read from tiers whose checksums are verified.",
        "give a share of the payloads, 0 to 1",
        _between(0, 1),
        "share, 0 to 1",
    )
    tiers: str | None = _text(
        "DLIO_TIERS",
        "Tiers of each node, where --tiers or `tiers=` is not given: "
        "ram:2GiB,/local/scratch:20GiB, or none.",
        "RAM, up to a quarter of the free memory",
    )
    cache: str | None = _text(
        "DLIO_CACHE",
        "Folder for indexes of data sets and measured speeds of tiers.",
        "dlio in XDG_CACHE_HOME or in ~/.cache",
    )
    logs: str | None = _text(
        "DLIO_LOGS",
        "Folder in which each rank keeps a copy of its output, rank-0.log and so on, as `dlio "
        "launch --logs` does.",
        "no copies",
    )
    max_pixels: int = _setting(
        "DLIO_MAX_PIXELS",
        "integer",
        178_956_970,
        "Maximum size of an image; larger ones count as damaged.",
        "give a number of pixels from 1",
        _positive_integer,
        "pixels",
    )
    native: bool = _switch(
        "DLIO_NATIVE",
        "Decodes baseline JPEGs with dlio's own decoder, where it was built; the pixels are "
        "the same as libjpeg-turbo's.",
        True,
    )
    follow_links: bool = _switch(
        "DLIO_FOLLOW_LINKS",
        "Follows symbolic links that lead out of a data set's folder, as --follow-links does.",
    )
    trust: bool = _switch(
        "DLIO_TRUST",
        "Lifts the guards against data sets of strangers, as --trust does: bounds on how far files "
        "may expand, and the first reading of HDF5, Parquet and Arrow files in another process.",
    )
    cuda_aware: bool | None = _setting(
        "DLIO_CUDA_AWARE",
        "0 or 1",
        None,
        "Overrides the detection of MPI libraries that sum GPU memory without blocking.",
        "give 1 if MPI can sum GPU memory, else 0",
        _zero_or_one,
        default_text="asked of the library",
    )
    nccl: bool = _switch(
        "DLIO_NCCL",
        "Has `dlio train` connect the GPUs of its ranks by NCCL, which sums the gradients of "
        "`allreduce` without a compressor in their memory; all other exchanges pass through the "
        "host. Not yet tried between GPUs.",
    )
    node: str | None = _text(
        "DLIO_NODE",
        "Name of the node that this rank runs on; ranks with the same name share tiers.",
        "the host's name",
    )
    no_fork: bool = _switch(
        "DLIO_NO_FORK",
        "Keeps `dlio stage` in its own process, which cannot end while a source hangs.",
    )
    min_ranks: int | None = _setting(
        "DLIO_MIN_RANKS",
        "integer",
        None,
        "Fewest ranks that go on when others are lost, for ranks of `mpirun --with-ft ulfm`; "
        "`dlio train --fault-tolerance shrink` sets it.",
        "give a number of ranks from 1",
        _positive_integer,
        "ranks",
        default_text="none: the job ends with any rank",
    )
    node_timeout_s: float = _seconds(
        "DLIO_NODE_TIMEOUT",
        2.0,
        "Time without a sign of life between the launcher and a node of `dlio train --nodes` after "
        "which the node is lost, and ends its ranks by itself.",
    )
    remote_shell: str | None = _text(
        "DLIO_RSH",
        "Remote shell, with options, that starts ranks on the nodes of --nodes.",
        "ssh",
    )
    hang_after_s: float | None = _setting(
        "DLIO_HANG_AFTER",
        "number",
        None,
        "Time without progress after which a rank that all others of its node wait for hangs, "
        "and is killed, in loops of your own and `dlio run` where ranks survive others; 0 for "
        "never.",
        "give seconds, such as 60, or 0 for never",
        _between(0),
        "seconds",
        default_text="never; `dlio train` has --hang-after",
    )
    alone: bool = _switch(
        "DLIO_ALONE",
        "Lets each process that srun, mpirun or torchrun started do all of the work by itself, for "
        "separate runs on purpose; otherwise processes that do not find each other are refused.",
    )
    debug: bool = _switch("DLIO_DEBUG", "Prints the traceback of an error, as --debug does.")


SETTINGS: Final[tuple[Setting, ...]] = tuple(each.metadata["setting"] for each in fields(Settings))
"""All variables, in the order of `Settings`."""
MIN_RANKS: Final = "DLIO_MIN_RANKS"
LAUNCHER: Final = "DLIO_LAUNCHER_PID"
DONE: Final = "DLIO_DONE"
FAILURES: Final = "DLIO_FAILURES"
SPARES: Final = "DLIO_SPARES"
TERMINAL: Final = "DLIO_TERMINAL"
PROGRESS: Final = "DLIO_PROGRESS"
STORE: Final = "DLIO_STORE"
SECRET: Final = "DLIO_SECRET"  # noqa: S105 - the name of the variable
RECORD: Final = "DLIO_RECORD"
AGENT: Final = "DLIO_AGENT"
START: Final = "DLIO_START"
TRIAL: Final = "DLIO_TRIAL"
TRIAL_LINK: Final = "DLIO_TRIAL_LINK"
REHEARSAL: Final = "DLIO_REHEARSAL"
DEVICE_TIER: Final = "DLIO_TEST_DEVICE_TIER"
DEVICE_EXCHANGE: Final = "DLIO_TEST_DEVICE_EXCHANGE"
INTERNAL: Final[dict[str, str]] = {
    LAUNCHER: "Process id of the launcher, set for the ranks that it starts.",
    DONE: "File that the ranks make at their successful end, where they survive others.",
    FAILURES: "Folder in which ranks leave the reason of their end, for the launcher to print.",
    SPARES: "Number of ranks that wait at first, set for the ranks that dlio starts.",
    TERMINAL: "Set for ranks when the launcher's standard output is a terminal.",
    PROGRESS: "Set for ranks whose launcher draws their progress from marked lines of theirs.",
    STORE: "Folder of the launcher's store, set for ranks of torch.distributed that it starts.",
    SECRET: "Secret by which ranks know each other, set for ranks of torch.distributed that dlio "
    "starts; under torchrun, set it yourself, to the same on all nodes.",
    TRIAL: "Folder of the trial, set for ranks of `dlio search`: scripts may keep files there.",
    TRIAL_LINK: "Descriptor by which a trial of `dlio search` tells its results.",
    REHEARSAL: "Set for a process that reads files before the one that needs them does.",
    RECORD: "Options of the command as JSON, set for the ranks that it starts.",
    AGENT: "Folder of the node's agent, set for the ranks that it keeps state for.",
    START: "Number of the start and ranks of a job that starts again, as JSON.",
    "DLIO_BUILD_NATIVE": "Read when dlio is built: 0 leaves out its JPEG decoder, 1 requires it.",
    DEVICE_EXCHANGE: "Set by tests: exchanges of CPU tensors go by gloo as those of GPUs by NCCL.",
    DEVICE_TIER: "Set by tests: the tier gpu:SIZE:decoded may be in the memory of any device.",
    "DLIO_TEST_DATA": "Folder with real images for dlio's own tests.",
}
"""Variables that dlio sets for its own processes, or that only its tests read."""
_NAMES: Final = tuple(setting.name for setting in SETTINGS)


def settings() -> Settings:
    """Return the settings of this process.

    Parsed values are cached, but a changed variable takes effect at the next call.

    Raises UsageError if a variable is invalid.
    """
    return _parsed(tuple(map(os.environ.get, _NAMES)))


@functools.lru_cache(maxsize=64)
def _parsed(texts: tuple[str | None, ...]) -> Settings:
    values = {
        each.name: setting.read(text)
        for each, setting, text in zip(fields(Settings), SETTINGS, texts, strict=True)
    }
    return Settings(**values)  # type: ignore[arg-type] # each parser gives its field's type


def unknown_variables(names: Iterable[str]) -> list[tuple[str, str | None]]:
    """Return the names of the form `DLIO_*` that are not settings, each with the nearest setting.

    Names that begin with DLIO_TEST_ belong to dlio's tests and are left out.
    """
    known = {*_NAMES, *INTERNAL}
    ours = [name for name in names if name.startswith("DLIO_") and name not in known]
    wrong = sorted(name for name in ours if not name.startswith("DLIO_TEST_"))
    nearest = [difflib.get_close_matches(name, _NAMES, 1) for name in wrong]
    return [(name, next(iter(near), None)) for name, near in zip(wrong, nearest, strict=True)]
