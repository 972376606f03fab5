"""Names of exchanges: `gossip`, `hierarchical+bf16`, `local-sgd(8)+adaptive`.

An exchange combines a payload (gradients, weights or changes of weights), a topology, a compressor,
a period in steps and a rule for merging received values. The presets name published combinations:

| preset | algorithm |
|---|---|
| `allreduce`, `hierarchical`, `tree`, `parameter-server` | synchronous averages of gradients |
| `gossip` | GossipGraD (arXiv 1803.05880): averages weights with one rank per step |
| `noloco(STEPS)` | NoLoCo (arXiv 2506.10911): DiLoCo between random pairs of ranks |
| `asgd` | ASGD (arXiv 1505.04956): sends weights to random ranks without waiting |
| `local-sgd(STEPS)` | local SGD (arXiv 1805.09767): averages changes of weights periodically |
| `diloco(STEPS)` | DiLoCo (arXiv 2311.08105): local SGD with an outer optimizer |

Behind the steps, `diloco` and `noloco` take the `rate` and `momentum` of their outer optimizer:
`diloco(32,rate=0.7,momentum=0.9)` has those of its paper.

`noloco(1)+adaptive` and `noloco(3)+onebit` exchange often, with small messages: differences to a
copy of weights that both ranks of a pair have, after CHOCO-SGD (arXiv 1902.00340). They have no
outer momentum, but a momentum of what brings ranks together, of which `consensus` is the size.

With a compressor, `diloco` is SparseLoCo (arXiv 2508.15706), with error feedback. What `threshold`
sends is so little that the residual, which decays, takes the place of the outer momentum.

`diloco(32,fragments=4)` is Streaming DiLoCo (arXiv 2501.18512): a quarter of the weights every 8
steps. `local-sgd` takes fragments, too.

With several nodes, at least one of them with several ranks, `gossip` and `noloco` are between
nodes, with the mean within each. Otherwise they are between ranks, even on one machine.
`gossip(flat)` is always between ranks.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from dlio.errors import UsageError
from dlio.util.arguments import nearest
from dlio.util.plugins import plugins


@dataclass(frozen=True, slots=True)
class CompressorEntry:
    """A compressor's line in the table."""

    factory: str
    """`module:function`, called with (pieces, scratch); see `dlio.exchange.compress`."""
    defers: bool = False
    """True if it defers most of a message to the residual: not for whole weights."""
    takes_differences: bool = False
    """True if noloco may send differences with it."""


COMPRESSORS: Final = {
    "onebit": CompressorEntry("dlio.exchange.compress.onebit:OneBit", True, True),
    "ternary": CompressorEntry("dlio.exchange.compress.sparse:ternary", True, True),
    # Not for differences: its level adapts too slowly to them.
    "threshold": CompressorEntry("dlio.exchange.compress.threshold:threshold", True),
    "adaptive": CompressorEntry("dlio.exchange.compress.sparse:adaptive", True, True),
    "int8": CompressorEntry("dlio.exchange.compress.int8:Int8"),
    "bf16": CompressorEntry("dlio.exchange.compress.half:Bfloat16"),
    "fp16": CompressorEntry("dlio.exchange.compress.half:Float16"),
}
"""Compressors of dlio. Modules are named, not imported: the command line parses exchanges, and must
not load torch for it."""


def compressor_entry(name: str) -> CompressorEntry | None:
    """Return the entry of a compressor: one of dlio's, or one that an installed package adds."""
    if name in COMPRESSORS:
        return COMPRESSORS[name]
    for plugin in plugins("dlio.compressors").select(name=name):
        # It may leave out any part of a message, so that it is not trusted with whole weights.
        return CompressorEntry(plugin.value, defers=True)
    return None


_PATTERN: Final = re.compile(r"([a-z-]+)(?:\(([^)]*)\))?(?:\+([a-z0-9]+))?")
_TAKES_DIFFERENCES: Final = tuple(k for k, each in COMPRESSORS.items() if each.takes_differences)


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """One exchange; made by `parse_exchange`."""

    preset: str
    payload: str
    """`gradient`, `weight`, `delta`, or `difference` to what a partner has heard."""
    topology: str
    """`all`, `hierarchical`, `tree`, `star`, `dissemination`, `hypercube`, `pairs`, `fixed-pairs`
    or `random`."""
    merge: str
    """`sum` over all ranks, `half` of two ranks, `parzen` of accepted ones, `outer` optimizer of
    the sum, `outer-pairs` of the mean of two ranks, or `accumulated`: the sum, whose residual
    decays as an outer optimizer's momentum does."""
    period: int = 1
    """Minimum number of steps between two exchanges."""
    compressor: str | None = None
    flat: bool = False
    """Gossip between all ranks, regardless of nodes."""
    fragments: int = 1
    """Parts of the weights that are exchanged at different times of a period."""
    rate: float = 1.0
    """Learning rate of the outer optimizer."""
    momentum: float = 0.0
    """Momentum of the outer optimizer."""
    consensus: float = 0.0
    """How far momentum carries a rank towards its partner, over the move of an exchange."""

    @property
    def alike(self) -> bool:
        """True if all ranks have bit-identical weights after every step."""
        return self.payload == "gradient" and self.merge == "sum"

    @property
    def pairwise(self) -> bool:
        """True if a rank averages its weights with one other at a time."""
        return self.merge in ("half", "outer-pairs")

    @property
    def ranks_differ(self) -> bool:
        """True if no step makes the ranks' weights equal; they depend on when messages arrive."""
        return self.pairwise or self.merge == "parzen"

    @property
    def codec(self) -> str | None:
        """The compressor that makes the messages.

        Changes of local steps are sent rarely: `adaptive` sends more of them, so that the network
        trains nearly as without compression.
        """
        if self.compressor == "adaptive" and self.payload == "delta" and self.period > 1:
            return "ternary"
        return self.compressor

    @property
    def decay(self) -> float:
        """Share of an error-feedback residual that is still owed at the next exchange."""
        return _DECAY if self.merge == "accumulated" else 1.0

    def __str__(self) -> str:
        text = self.preset
        if self.preset in _ARGUMENTS:
            usual = _usual(self.preset, self.compressor)
            more = [
                f"{name}={getattr(self, name)!r}"
                for name in _ARGUMENTS[self.preset]
                if getattr(self, name) != getattr(usual, name)
            ]
            text += f"({','.join([str(self.period), *more])})"
        elif self.preset == "gossip":
            arguments = [self.topology] if self.topology != _PRESETS["gossip"].topology else []
            arguments += ["gradient"] if self.payload == "gradient" else []
            arguments += ["flat"] if self.flat else []
            text += f"({','.join(arguments)})" if arguments else ""
        return text if self.compressor is None else f"{text}+{self.compressor}"


_PRESETS: Final = {
    each.preset: each
    for each in (
        ExchangeSpec("allreduce", "gradient", "all", "sum"),
        ExchangeSpec("hierarchical", "gradient", "hierarchical", "sum"),
        ExchangeSpec("tree", "gradient", "tree", "sum"),
        ExchangeSpec("parameter-server", "gradient", "star", "sum"),
        ExchangeSpec("gossip", "weight", "dissemination", "half"),
        ExchangeSpec("asgd", "weight", "random", "parzen"),
        ExchangeSpec("noloco", "weight", "pairs", "outer-pairs", 32, momentum=0.5),
        ExchangeSpec("local-sgd", "delta", "all", "sum", 8),
        ExchangeSpec("diloco", "delta", "all", "outer", 32, momentum=0.7),
    )
}
"""With their defaults. The outer rates and momenta differ from those of the papers, 0.7 with 0.5
and 0.7 with 0.9: they were found together with the learning rate of local steps, see
`TrainConfig.peak_lr`."""
# Every step: `adaptive` every step loses less than one bit every third step (0.48 and 0.70 points
# behind allreduce), with fewer bytes. A move of 2.7 in all makes ranks swing, one of 1.2 does not.
_OF_DIFFERENCES: Final = replace(_PRESETS["noloco"], period=1, momentum=0.0, consensus=1.2)
"""`noloco` with a compressor of differences."""
_ARGUMENTS: Final = {
    "noloco": ("rate", "momentum", "consensus"),
    "local-sgd": ("fragments",),
    "diloco": ("fragments", "rate", "momentum"),
}
"""The presets that take steps, and those that may follow."""
_DECAY: Final = 0.95
_MOST_CONSENSUS: Final = 4
"""Ranks swing about their mean well before it."""
_GOSSIP: Final = ("dissemination", "hypercube", "gradient", "flat")
"""Arguments of gossip, separated by commas."""
NAMES: Final = tuple(_PRESETS)
USAGE: Final = (
    f"choose one of {', '.join(NAMES)}; gossip(hypercube), gossip(gradient), gossip(flat), "
    "noloco(STEPS,rate=R,momentum=M,consensus=C), local-sgd(STEPS), "
    "diloco(STEPS,fragments=NUMBER,rate=R,momentum=M); and behind it, with a +, one of "
    f"{', '.join(COMPRESSORS)}"
)


def parse_exchange(text: str) -> ExchangeSpec:
    """Parse the name of an exchange.

    Raises UsageError, listing the valid names, for any other text.
    """
    match = _PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match[1] not in _PRESETS:
        first = re.split(r"[(+]", str(text).strip())[0]
        close = nearest(first, NAMES) if first not in NAMES else ""
        remedy = f"there is none of that name{close}" if close else USAGE
        raise UsageError(f"exchange {text!r}: {remedy}")
    name, argument, compressor = match.groups()
    spec = _usual(name, compressor)
    payload, topology, merge = spec.payload, spec.topology, spec.merge
    flat = False
    if name in _ARGUMENTS:
        spec = _with_steps(text, argument, spec)
    elif argument is not None:
        kinds = [kind.strip() for kind in argument.split(",")]
        if name != "gossip" or not set(kinds) <= set(_GOSSIP):
            close = "".join(nearest(kind, _GOSSIP) for kind in kinds if kind not in _GOSSIP)
            raise UsageError(f"exchange {text!r}: {USAGE}{close if name == 'gossip' else ''}")
        flat = "flat" in kinds
        payload = "gradient" if "gradient" in kinds else payload
        topology = "hypercube" if "hypercube" in kinds else topology
    if compressor is not None:
        entry = compressor_entry(compressor)
        if entry is None:
            close = nearest(compressor, COMPRESSORS)
            raise UsageError(
                f"exchange {text!r}: unknown compressor {compressor!r}; choose one of "
                f"{', '.join(COMPRESSORS)}{close}"
            )
        if payload == "weight" and entry.defers:
            if name == "gossip":
                payload = "delta"  # Most changes are nearly zero; most weights never are.
            elif _sends_differences(name, compressor):
                # Not random pairs: each partner takes a copy of the weights.
                payload, topology = "difference", "fixed-pairs"
            else:
                raise UsageError(
                    f"exchange {text!r}: {name} sends whole weights, of which {compressor} would "
                    "send only a small part: choose bf16, fp16 or int8"
                    + (f", or {', '.join(_TAKES_DIFFERENCES)}" if name == "noloco" else "")
                )
        if merge == "outer" and compressor == "threshold":
            if argument is not None and ("rate" in argument or "momentum" in argument):
                raise UsageError(
                    f"exchange {text!r}: with threshold the residual takes the place of the outer "
                    "optimizer: leave out its rate and momentum, or choose adaptive or onebit"
                )
            merge = "accumulated"
    if merge == "outer-pairs" and spec.rate == 1 and not spec.momentum:
        merge = "half"  # Such an outer optimizer takes the mean as it is.
    return replace(
        spec, payload=payload, topology=topology, merge=merge, compressor=compressor, flat=flat
    )


def _sends_differences(name: str, compressor: str | None) -> bool:
    """True if messages are differences to a copy that both ranks of a pair have."""
    return name == "noloco" and compressor in _TAKES_DIFFERENCES


def _usual(name: str, compressor: str | None) -> ExchangeSpec:
    """Return a preset with its defaults."""
    return _OF_DIFFERENCES if _sends_differences(name, compressor) else _PRESETS[name]


def _with_steps(text: str, argument: str | None, usual: ExchangeSpec) -> ExchangeSpec:
    """Return a preset with its arguments, of `name(STEPS,NAME=VALUE...)`."""
    if argument is None:
        return usual
    name = usual.preset
    steps, *rest = (part.strip() for part in argument.split(","))
    if not steps.isdecimal() or int(steps) < 1:
        raise UsageError(f"exchange {text!r}: {name}(STEPS) wants a number of steps from 1")
    given: dict[str, str] = {}
    for part in rest:
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in _ARGUMENTS[name] or key in given:
            taken = "is given twice" if key in given else "is not an argument"
            raise UsageError(
                f"exchange {text!r}: {key} {taken}; {name}(STEPS) takes "
                f"{', '.join(_ARGUMENTS[name])}{nearest(key, _ARGUMENTS[name])}"
            )
        given[key] = value
    fragments = given.get("fragments", "1")
    if not fragments.isdecimal() or not 1 <= int(fragments) <= int(steps):
        raise UsageError(
            f"exchange {text!r}: give fragments from 1 to {steps}, the period: each is "
            "exchanged at another step"
        )
    rate = _number(text, "rate", given, usual.rate)
    momentum = _number(text, "momentum", given, usual.momentum)
    if rate <= 0 or not 0 <= momentum < 1:
        raise UsageError(
            f"exchange {text!r}: the outer optimizer wants a rate above 0, and a momentum from 0 "
            "to below 1"
        )
    if name == "noloco" and rate <= momentum:
        raise UsageError(
            f"exchange {text!r}: ranks of noloco stay together only if the rate exceeds the "
            "momentum"
        )
    consensus = _number(text, "consensus", given, usual.consensus)
    if not 0 <= consensus <= _MOST_CONSENSUS or ("consensus" in given and not usual.consensus):
        raise UsageError(
            f"exchange {text!r}: consensus is a number from 0 to {_MOST_CONSENSUS}, of noloco with "
            f"one of {', '.join(_TAKES_DIFFERENCES)}"
        )
    return replace(
        usual,
        period=int(steps),
        fragments=int(fragments),
        rate=rate,
        momentum=momentum,
        consensus=consensus,
    )


def _number(text: str, key: str, given: Mapping[str, str], usual: float) -> float:
    try:
        number = float(given.get(key, usual))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"exchange {text!r}: {key}={given[key]} is not a number")
    return number
