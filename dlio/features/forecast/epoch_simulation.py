"""Simulate an epoch: when data arrives, is decoded and is consumed on every rank.

Messages, reads and steps are planned by the code of real runs; only durations are modelled. A link
carries one message at a time in each direction. The source serves one request at a time at its full
bandwidth. The ranks of a node share its tiers. Ranks decode batches ahead of their use, and start
each step together, as in synchronous training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.loader.planned_traffic import ForecastJob, WindowMessages, messages_of
from dlio.plan.schedule import StepAssignment

_F64 = npt.NDArray[np.float64]
_DETECTED_S: Final = 1.0
"""Time from a rank's death until the other ranks continue."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that a job runs on. Bandwidths in bytes/s, times in seconds."""

    source_rate: float = 10e9
    """Bandwidth of the source for all nodes together."""
    source_latency_s: float = 0.005
    link_rate: float = 12.5e9
    """Bandwidth of a node's network in each direction."""
    link_latency_s: float = 20e-6
    """Latency of a message, including software."""
    tier_rates: tuple[float, ...] = (8e9, 2e9)
    """Bandwidth of each tier of a node, fastest first."""
    decode_rate: float = 4000.0
    """Samples per second that all threads of a rank decode together."""
    model_s: float = 0.1
    """Computing time of a step."""
    ahead: int = 4
    """Number of batches that a rank prepares ahead."""
    jitter: float = 0.0
    """Relative standard deviation of decoding and computing times, drawn per step and rank."""
    slow: dict[int, float] = field(default_factory=dict)
    """Factor by which decoding and computing take longer, by rank."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times of a simulated epoch."""

    seconds: float
    first_batch_s: float
    """Time until every rank has its first batch."""
    stall_s: float
    """Time that the job waits for data: all time but the slowest rank's computing."""
    busy: dict[str, float]
    """Share of the epoch in which a resource is in use, by kind, for the busiest of its kind."""
    moved_bytes: int
    """Payload bytes sent between nodes."""
    messages: int

    @property
    def bottleneck(self) -> str:
        """Kind of the resource that is in use for the largest share of the epoch."""
        return max(self.busy, key=lambda name: self.busy[name])


class _SimulationState:
    """Clocks of all ranks and nodes."""

    def __init__(self, job: ForecastJob) -> None:
        ranks, nodes = job.ranks.size, len(job.nodes)
        self.link_out, self.link_in = np.zeros(nodes), np.zeros(nodes)
        self.out_busy, self.in_busy = np.zeros(nodes), np.zeros(nodes)
        self.tier_busy = np.zeros(nodes)
        self.source_free = self.source_busy = 0.0
        self.decoded = np.zeros(ranks)
        self.decode_busy = np.zeros(ranks)
        self.step_end = self.computing = 0.0
        self.started: list[_F64] = []
        """Per step, the time at which each rank began it; shape (ranks,)."""
        self.moved = self.messages = 0


def run(
    job: ForecastJob,
    machine: Machine,
    *,
    epoch: int = 1,
    cold: bool = False,
    failures: Sequence[tuple[int, int]] = (),
    seed: int = 0,
) -> Timeline:
    """Simulate one epoch of a job; a cold one starts with empty tiers, as the first one of a job.

    `failures` are (step, rank) of deaths, by ascending step; the other ranks shrink and continue.
    The seed is that of the jitter.
    """
    generator = np.random.default_rng(seed)
    state = _SimulationState(job)
    fills = _filled(job, machine, epoch) if cold else None
    if fills is not None and len(fills):
        state.source_free = state.source_busy = float(fills.max())
    before: list[range] = []
    for dealt in job.dealt(epoch):
        died = next((f for f in failures if f[0] in dealt.steps), None)
        # A rank plans a window once it has started all steps of the window before the last.
        planned = np.zeros(job.ranks.size)
        if len(before) >= 2:
            planned = state.started[before[-1].start - 1]
        before.append(dealt.steps)
        _window(job, machine, dealt, planned, state, fills, generator)
        if died is not None:
            return _after(job, machine, state, died, epoch, failures, seed)
    return _timeline(state)


def _after(
    job: ForecastJob,
    machine: Machine,
    state: _SimulationState,
    died: tuple[int, int],
    epoch: int,
    failures: Sequence[tuple[int, int]],
    seed: int,
) -> Timeline:
    """Simulate the rest of an epoch, re-dealt among the ranks that survive a death.

    The death takes effect at the end of its window. Returns the times of the whole epoch.
    """
    consumed = job.position + len(state.started) * job.batch_size * job.ranks.size
    rest = replace(
        job, position=min(consumed, job.samples), gone=tuple(sorted({*job.gone, died[1]}))
    )
    done = len(state.started)
    later = [(step - done, rank) for step, rank in failures if step > died[0]]
    so_far = _timeline(state)
    if rest.position >= rest.samples or not rest.ranks.size:
        return so_far
    left = run(rest, machine, epoch=epoch, failures=later, seed=seed + 1)
    seconds = so_far.seconds + _DETECTED_S + left.seconds
    return Timeline(
        seconds,
        so_far.first_batch_s,
        so_far.stall_s + _DETECTED_S + left.stall_s,
        {
            name: (share * so_far.seconds + left.busy[name] * left.seconds) / seconds
            for name, share in so_far.busy.items()
        },
        so_far.moved_bytes + left.moved_bytes,
        so_far.messages + left.messages,
    )


def _timeline(state: _SimulationState) -> Timeline:
    seconds = max(state.step_end, 1e-9)
    first = float(state.started[0].max()) if state.started else 0.0
    return Timeline(
        state.step_end,
        first,
        state.step_end - state.computing,
        {
            "source": state.source_busy / seconds,
            "link": float(max(state.out_busy.max(), state.in_busy.max())) / seconds,
            "tier": float(state.tier_busy.max()) / seconds,
            "decode": float(state.decode_busy.max()) / seconds,
            "model": state.computing / seconds,
        },
        state.moved,
        state.messages,
    )


def _window(
    job: ForecastJob,
    machine: Machine,
    dealt: StepAssignment,
    planned: _F64,
    state: _SimulationState,
    fills: _F64 | None,
    generator: np.random.Generator,
) -> None:
    """Move a window's samples, then decode and consume its steps.

    `planned` is the time at which each rank planned the window, shape (ranks,); `fills` that at
    which each block arrives in its tier, shape (blocks,), None if all are there.
    """
    ranks = job.ranks
    sizes = job.bytes_of(dealt.samples)
    block = job.layout.block_of(dealt.samples)
    tier, home = job.placement.tier[block], job.placement.home[block]
    node = ranks.node_of[dealt.consumer]
    filled = np.zeros(len(sizes)) if fills is None else fills[block]
    step = dealt.step - dealt.steps.start
    rates: _F64 = np.array([*machine.tier_rates[: int(tier.max(initial=0)) + 1], np.inf])
    # Samples from peers: read from their tiers, sent over the links of both nodes.
    messages = messages_of(job, dealt)
    sent = dealt.sender >= 0
    arrival = np.zeros(ranks.size)
    if sent.any():
        packed = np.bincount(dealt.sender[sent], sizes[sent] / rates[tier[sent]], ranks.size)
        np.add.at(state.tier_busy, ranks.node_of, packed)
        latest = np.zeros(ranks.size)
        np.maximum.at(latest, dealt.sender[sent], filled[sent])
        ready = np.maximum(planned + packed, latest)
        _send(messages, ready, machine, job, state, arrival)
    # Samples that ranks read themselves: from their node's tiers, or from the source.
    local = ~sent & (home == node) & (tier >= 0)
    available = np.zeros((ranks.size, len(dealt.steps)))
    reading = np.zeros((ranks.size, len(dealt.steps)))
    np.add.at(reading, (dealt.consumer[local], step[local]), sizes[local] / rates[tier[local]])
    np.maximum.at(available, (dealt.consumer[local], step[local]), filled[local])
    np.add.at(state.tier_busy, ranks.node_of, reading.sum(1))
    away = ~sent & ~local
    wanted = np.bincount(step[away], sizes[away], len(dealt.steps))
    for k in np.flatnonzero(wanted).tolist():
        seconds = wanted[k] / machine.source_rate
        begin = max(state.source_free, float(planned.min()))
        state.source_free = begin + seconds
        state.source_busy += seconds
        mine = np.unique(dealt.consumer[away & (step == k)])
        available[mine, k] = np.maximum(
            available[mine, k], state.source_free + machine.source_latency_s
        )
    waits = np.zeros((ranks.size, len(dealt.steps)), np.bool_)
    waits[dealt.consumer[sent], step[sent]] = True
    counts = np.zeros((ranks.size, len(dealt.steps)))
    np.add.at(counts, (dealt.consumer, step), 1)
    slow = np.ones(ranks.size)
    for rank, times in machine.slow.items():
        if rank < ranks.size:
            slow[rank] = times
    noise = np.ones((2, len(dealt.steps), ranks.size))
    if machine.jitter:
        noise = np.maximum(0.1, generator.normal(1.0, machine.jitter, noise.shape))
    for k in range(len(dealt.steps)):
        ready_at: _F64 = np.maximum(state.decoded, np.maximum(available[:, k], planned))
        ready_at = np.maximum(ready_at, np.where(waits[:, k], arrival, 0.0))
        if len(state.started) >= machine.ahead:
            ready_at = np.maximum(ready_at, state.started[-machine.ahead])
        decoding = counts[:, k] / machine.decode_rate * slow * noise[0, k] + reading[:, k]
        state.decode_busy += decoding
        state.decoded = ready_at + decoding
        started = np.maximum(state.decoded, state.step_end)
        computing = machine.model_s * slow * noise[1, k]
        state.step_end = float((started + computing).max())
        state.computing += float(computing.max())
        state.started.append(started)


def _send(
    messages: WindowMessages,
    ready: _F64,
    machine: Machine,
    job: ForecastJob,
    state: _SimulationState,
    arrival: _F64,
) -> None:
    """Send messages over links in the order in which they are ready.

    `ready` is the time at which each rank's messages are ready. `arrival` is overwritten with the
    time of each rank's last arrival. Both have shape (ranks,).
    """
    node_of = job.ranks.node_of
    durations = messages.wire * (1 / machine.link_rate)
    order = np.argsort(ready[messages.sender], kind="stable")
    out, into = state.link_out.tolist(), state.link_in.tolist()
    latest = arrival.tolist()
    rows = zip(
        node_of[messages.sender][order].tolist(),
        node_of[messages.receiver][order].tolist(),
        messages.receiver[order].tolist(),
        ready[messages.sender][order].tolist(),
        durations[order].tolist(),
        strict=True,
    )
    for origin, target, receiver, at, seconds in rows:
        # A message arrives while it is being sent: it occupies both links for its whole duration.
        sent = max(at, out[origin])
        came = max(sent, into[target])
        out[origin], into[target] = sent + seconds, came + seconds
        latest[receiver] = max(latest[receiver], came + seconds + machine.link_latency_s)
    state.link_out[:], state.link_in[:], arrival[:] = out, into, latest
    nodes = len(job.nodes)
    state.out_busy += np.bincount(node_of[messages.sender], durations, nodes)
    state.in_busy += np.bincount(node_of[messages.receiver], durations, nodes)
    state.moved += int(messages.payload.sum())
    state.messages += len(messages.sender)


def _filled(job: ForecastJob, machine: Machine, epoch: int) -> _F64:
    """Return the time at which each block arrives in its tier; shape (blocks,).

    All nodes start filling their tiers at the same time, in the order of first use.
    """
    nodes = len(job.nodes)
    blocks = job.layout.blocks
    first = np.full(blocks, np.iinfo(np.int64).max)
    order = job.plan(epoch, 0).order
    for begin in range(0, job.samples, 1 << 18):
        positions = np.arange(begin, min(begin + (1 << 18), job.samples), dtype=np.int64)
        np.minimum.at(first, job.layout.block_of(order.samples(positions)), positions)
    home = job.placement.home
    arrived = np.zeros(blocks)
    for node in range(nodes):
        mine = np.flatnonzero(home == node)
        mine = mine[np.argsort(first[mine], kind="stable")]
        seconds = np.cumsum(job.block_bytes[mine]) * nodes / machine.source_rate
        arrived[mine] = machine.source_latency_s + seconds
    return arrived
