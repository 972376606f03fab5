"""What users write of an exchange: `gossip`, `hierarchical+bf16`, `local-sgd(8)+adaptive`.

An exchange is a payload (gradients, weights, or what weights have changed by), a topology that it
travels over, a compressor, a period in steps, and how what arrives is merged. The presets name the
combinations that were published; a compressor goes with those that can bear it.

`gossip` is between nodes, with the mean within each, where there are several nodes and several
ranks on one of them. Otherwise it is between ranks: those of one machine, too, for who asks for
gossip there wants it. `gossip(flat)` is between ranks wherever they are.
"""

import re
from dataclasses import dataclass
from typing import Final

from dlio.errors import UsageError

__all__ = ["COMPRESSORS", "NAMES", "USAGE", "ExchangeSpec", "parse_exchange"]

COMPRESSORS: Final = ("onebit", "threshold", "adaptive", "int8", "bf16", "fp16")
"""Names of compressors; see `dlio.train.exchange.compress`."""
_PATTERN: Final = re.compile(r"([a-z-]+)(?:\(([^)]*)\))?(?:\+([a-z0-9]+))?")
_SPARSE: Final = ("onebit", "threshold", "adaptive")
"""Compressors that leave most of it for later: of what adds up, not of weights."""


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """One exchange; made by `parse_exchange`."""

    preset: str
    payload: str
    """`gradient`, `weight` or `delta`."""
    topology: str
    """`all`, `hierarchical`, `tree`, `star`, `dissemination`, `hypercube` or `random`."""
    merge: str
    """`sum` of all, `half` of two, `parzen` of those that help, `outer` for an outer optimizer."""
    period: int = 1
    """Steps between two exchanges, at least."""
    compressor: str | None = None
    flat: bool = False
    """Of gossip: between all ranks, whichever nodes they are on."""

    def __str__(self) -> str:
        text = self.preset
        if self.preset in _PERIODS:
            text += f"({self.period})"
        elif self.preset == "gossip":
            said = [self.topology] if self.topology != _PRESETS["gossip"][1] else []
            said += ["gradient"] if self.payload == "gradient" else []
            said += ["flat"] if self.flat else []
            text += f"({','.join(said)})" if said else ""
        return text if self.compressor is None else f"{text}+{self.compressor}"


_PRESETS: Final = {
    "allreduce": ("gradient", "all", "sum"),
    "hierarchical": ("gradient", "hierarchical", "sum"),
    "tree": ("gradient", "tree", "sum"),
    "parameter-server": ("gradient", "star", "sum"),
    "gossip": ("weight", "dissemination", "half"),
    "asgd": ("weight", "random", "parzen"),
    "local-sgd": ("delta", "all", "sum"),
    "diloco": ("delta", "all", "outer"),
}
_PERIODS: Final = {"local-sgd": 8, "diloco": 32}
"""Presets whose argument is a period, and what it is by default."""
_GOSSIP: Final = ("dissemination", "hypercube", "gradient", "flat")
"""What gossip takes as arguments, with commas between."""
NAMES: Final = tuple(_PRESETS)
USAGE: Final = (
    f"choose one of {', '.join(NAMES)}; gossip(hypercube), gossip(gradient), gossip(flat), "
    f"local-sgd(STEPS), diloco(STEPS); and behind it, with a +, one of {', '.join(COMPRESSORS)}"
)


def parse_exchange(text: str) -> ExchangeSpec:
    """Raises UsageError, saying what there is, for anything else."""
    match = _PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match[1] not in _PRESETS:
        raise UsageError(f"exchange {text!r}: {USAGE}")
    name, argument, compressor = match.groups()
    payload, topology, merge = _PRESETS[name]
    period, flat = 1, False
    if name in _PERIODS:
        period = _PERIODS[name]
        if argument is not None:
            if not argument.strip().isdigit() or int(argument) < 1:
                raise UsageError(f"exchange {text!r}: {name}(STEPS) wants a number of steps from 1")
            period = int(argument)
    elif argument is not None:
        kinds = [kind.strip() for kind in argument.split(",")]
        if name != "gossip" or not set(kinds) <= set(_GOSSIP):
            raise UsageError(f"exchange {text!r}: {USAGE}")
        flat = "flat" in kinds
        payload = "gradient" if "gradient" in kinds else payload
        topology = "hypercube" if "hypercube" in kinds else topology
    if compressor is not None:
        if compressor not in COMPRESSORS:
            raise UsageError(f"exchange {text!r}: compressor {compressor!r} is none; {USAGE}")
        if payload == "weight" and compressor in _SPARSE:
            if name == "gossip":
                payload = "delta"  # Of weights most is never nearly zero; of their changes it is.
            else:
                raise UsageError(
                    f"exchange {text!r}: {name} sends whole weights, of which {compressor} leaves "
                    "most for later: choose bf16, fp16 or int8"
                )
    return ExchangeSpec(name, payload, topology, merge, period, compressor, flat)
