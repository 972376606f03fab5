"""Forecasts: limits of links, sources and computing hold, and the bottleneck is named."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.features.forecast.epoch_simulation import Machine, run
from dlio.features.forecast.forecast_analysis import forecast, resized
from dlio.loader.planned_traffic import ForecastJob, job_of, messages_of, traffic
from dlio.plan.placement import HomeNode

FAST = Machine(
    source_rate=1e15,
    source_latency_s=0,
    link_rate=1e15,
    link_latency_s=0,
    tier_rates=(1e15, 1e15),
    decode_rate=1e12,
    model_s=0.1,
)
SIZE = 100_000


def _job(
    samples: int = 20_000,
    nodes: int = 4,
    local: int = 2,
    batch: int = 16,
    mode: str = "batch",
    capacity: int = 1 << 40,
) -> ForecastJob:
    named = tuple(HomeNode(f"node{number}", (capacity,)) for number in range(nodes))
    return job_of(samples, SIZE, named, local, batch, mode)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3000),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from(["batch", "global", "ring", "local", "partial(0.2)"]),
    st.floats(0, 1.2),
)
def test_traffic_adds_up(
    samples: int, nodes: int, local: int, batch: int, mode: str, share: float
) -> None:
    job = _job(samples, nodes, local, batch, mode, int(share * samples * SIZE / nodes))
    counts = traffic(job)
    assert counts.samples == samples
    assert counts.payload == samples * SIZE
    assert counts.source + sum(counts.tiers) == counts.payload
    assert counts.link_out.sum() == counts.link_in.sum() == counts.wire
    assert counts.moved <= counts.wire
    assert counts.messages <= job.ranks.size * counts.peers * counts.windows
    assert counts.windows == len(job.windows())
    pinned = job.placement.home[job.layout.block_of(np.arange(samples))] >= 0
    assert sum(counts.tiers) == pinned.sum() * SIZE
    line = run(job, FAST)
    assert (line.moved_bytes, line.messages) == (counts.moved, counts.messages)


def test_a_job_that_never_waits_takes_its_computing_time() -> None:
    for mode in ("batch", "global", "local"):
        job = _job(mode=mode)
        line = run(job, FAST)
        assert line.seconds == pytest.approx(job.steps * 0.1, rel=1e-3)
        assert line.stall_s == pytest.approx(0, abs=1e-3)
        assert line.bottleneck == "model"


def test_a_slow_source_delays_blocks_outside_the_tiers() -> None:
    job = _job(capacity=20_000 * SIZE // 8)
    away = traffic(job).source
    assert away == pytest.approx(20_000 * SIZE / 2, rel=0.02)
    line = run(job, replace(FAST, source_rate=20e6, model_s=0.001))
    assert line.seconds == pytest.approx(away / 20e6, rel=0.02)
    assert line.bottleneck == "source"
    whole = int(job.block_bytes[job.placement.home >= 0].sum())
    cold = run(job, replace(FAST, source_rate=20e6, model_s=0.001), epoch=0, cold=True)
    assert cold.seconds == pytest.approx((away + whole) / 20e6, rel=0.02)


def test_slow_links_delay_samples_that_move() -> None:
    job = _job(mode="global")
    counts = traffic(job)
    busiest = max(counts.link_out.max(), counts.link_in.max())
    line = run(job, replace(FAST, link_rate=50e6, model_s=0.001))
    assert busiest / 50e6 <= line.seconds <= 1.35 * busiest / 50e6
    assert line.bottleneck == "link"
    assert run(_job(), replace(FAST, link_rate=50e6, model_s=0.001)).seconds < line.seconds / 4


def test_slow_decoding_and_slow_ranks_delay_all_ranks() -> None:
    job = _job()
    decode = run(job, replace(FAST, decode_rate=100.0, model_s=0.001))
    assert decode.seconds == pytest.approx(job.samples / 8 / 100, rel=0.02)
    assert decode.bottleneck == "decode"
    slow = run(job, replace(FAST, slow={3: 2.0}))
    assert slow.seconds == pytest.approx(2 * job.steps * 0.1, rel=1e-2)
    once, again = (run(job, replace(FAST, jitter=0.1), seed=5) for _ in range(2))
    assert once == again
    # Each step takes as long as the slowest of eight normal draws.
    assert once.seconds / (job.steps * 0.1) == pytest.approx(1.14, abs=0.03)


def test_the_rest_of_an_epoch_is_trained_without_dead_ranks() -> None:
    job = _job(nodes=4, local=1, batch=25)
    line = run(job, FAST, failures=[(100, 2)])
    # 200 steps of 4 ranks; the steps left after the window of step 100 become 4/3 as many.
    assert 200 * 0.1 + 1 < line.seconds < 240 * 0.1 + 1
    assert line.stall_s >= 1
    both = run(job, FAST, failures=[(50, 0), (120, 1)])
    assert both.seconds > line.seconds


@pytest.mark.parametrize(
    ("machine", "capacity", "said"),
    [
        ({"source_rate": 10e6, "model_s": 0.001}, 1 << 27, "such nodes, or add"),
        ({"link_rate": 1e6, "model_s": 0.001}, 1 << 40, "network between nodes"),
        ({"decode_rate": 50.0, "model_s": 0.001}, 1 << 40, "wait for decoding"),
        ({}, 1 << 40, "computing limits the speed"),
        ({"source_rate": 10e6}, 1 << 40, "`dlio stage`"),
    ],
)
def test_the_bottleneck_is_named(machine: dict[str, Any], capacity: int, said: str) -> None:
    remedies = forecast(_job(capacity=capacity), replace(FAST, **machine)).remedies
    assert any(said in line for line in remedies), remedies


def test_the_number_of_nodes_in_a_remedy_holds_the_whole_data_set() -> None:
    job = _job(capacity=1 << 27)
    (line,) = [line for line in forecast(job, FAST).remedies if "hold it all" in line]
    nodes = int(line.split("hold it all, use ")[1].split(" such nodes")[0])
    assert traffic(resized(job, nodes)).source == 0
    assert traffic(resized(job, nodes - 2)).source > 0


def test_a_thousand_ranks_move_two_and_a_half_per_cent() -> None:
    """128 nodes of 8 ranks, batches of 32 and 1.28 million samples, in the mode `global`.

    docs/design derives the figure, under 'Train a sample where it lives'.
    """
    job = _job(1_280_000, 128, 8, 32)
    counts = traffic(job)
    assert counts.moved / counts.payload <= 0.0275
    windows = job.windows()[:2]
    for steps, batch, whole in zip(
        windows, job.dealt(1), replace(job, mode="global").dealt(1), strict=False
    ):
        for step in steps:
            ours, theirs = (np.sort(d.samples[d.step == step]) for d in (batch, whole))
            assert np.array_equal(ours, theirs)
        assert len(messages_of(job, batch).sender) < len(messages_of(job, whole).sender)
