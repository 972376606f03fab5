"""Specifications of exchanges, and their routes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.errors import UsageError
from dlio.exchange.compress import NAMES as COMPRESSORS
from dlio.exchange.exchange_spec import NAMES, parse_exchange
from dlio.exchange.routes import Op, route


@pytest.mark.parametrize(
    ("text", "payload", "topology", "period", "compressor"),
    [
        ("allreduce", "gradient", "all", 1, None),
        ("gossip", "weight", "dissemination", 1, None),
        ("gossip(hypercube)", "weight", "hypercube", 1, None),
        ("gossip(gradient)", "gradient", "dissemination", 1, None),
        ("gossip(hypercube, gradient)", "gradient", "hypercube", 1, None),
        ("gossip(flat)", "weight", "dissemination", 1, None),
        ("gossip(hypercube,flat)+int8", "weight", "hypercube", 1, "int8"),
        ("gossip+adaptive", "delta", "dissemination", 1, "adaptive"),
        ("gossip+bf16", "weight", "dissemination", 1, "bf16"),
        ("hierarchical+onebit", "gradient", "hierarchical", 1, "onebit"),
        ("local-sgd", "delta", "all", 8, None),
        ("diloco(50)+int8", "delta", "all", 50, "int8"),
        ("asgd+bf16", "weight", "random", 1, "bf16"),
        ("noloco(50)+int8", "weight", "pairs", 50, "int8"),
        ("noloco(4,rate=0.9,momentum=0.5)+onebit", "difference", "fixed-pairs", 4, "onebit"),
        ("noloco+adaptive", "difference", "fixed-pairs", 1, "adaptive"),
        ("noloco(2,consensus=0.5)+ternary", "difference", "fixed-pairs", 2, "ternary"),
        ("diloco(16,fragments=2,rate=0.7,momentum=0.9)", "delta", "all", 16, None),
        ("diloco(50, fragments=5)+int8", "delta", "all", 50, "int8"),
    ],
)
def test_specifications_are_parsed(
    text: str, payload: str, topology: str, period: int, compressor: str | None
) -> None:
    spec = parse_exchange(text)
    assert (spec.payload, spec.topology, spec.period, spec.compressor) == (
        payload,
        topology,
        period,
        compressor,
    )
    assert parse_exchange(str(spec)) == spec
    assert spec.flat == ("flat" in text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("telepathy", "choose one of"),
        ("gossip(ring)", "choose one of"),
        ("allreduce(3)", "choose one of"),
        ("local-sgd(0)", "number of steps"),
        ("local-sgd(x)", "number of steps"),
        ("local-sgd(4,fragments=5)", "give fragments from 1 to 4, the period"),
        ("local-sgd(4,parts=2)", "parts is not an argument; local-sgd.STEPS. takes fragments"),
        ("noloco(4,fragments=2)", "takes rate, momentum, consensus"),
        ("noloco(4,rate=0.5,momentum=0.5)", "only if the rate exceeds the momentum"),
        ("diloco(4,rate=0)", "a rate above 0"),
        ("diloco(4,momentum=1)", "a momentum from 0 to below 1"),
        ("diloco(4,momentum=x)", "momentum=x is not a number"),
        ("diloco(4,rate=1,rate=2)", "rate is given twice"),
        ("diloco(4,rat=1)", "did you mean rate"),
        ("diloco(4,momentum=0.5)+threshold", "leave out its rate and momentum"),
        ("allreduce+zip", "compressor 'zip'"),
        ("asgd+adaptive", "whole weights"),
        ("noloco+threshold", "choose bf16, fp16 or int8, or onebit, ternary, adaptive"),
        ("noloco(4,consensus=1)", "of noloco with one of onebit, ternary, adaptive"),
        ("noloco(4,consensus=5)+onebit", "consensus is a number from 0 to 4"),
        ("diloco(4,consensus=1)", "consensus is not an argument"),
        ("diloco(²)", "number of steps"),
        ("diloco(4,fragments=²)", "fragments from 1"),
        ("", "choose one of"),
    ],
)
def test_combinations_that_do_not_compose_are_refused_with_a_reason(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as raised:
        parse_exchange(text)
    assert len(str(raised.value)) < 400


def test_an_outer_optimizer_that_takes_the_mean_as_it_is_is_left_out() -> None:
    assert parse_exchange("noloco(4,momentum=0)").merge == "half"
    assert parse_exchange("noloco+adaptive").merge == "half"
    assert parse_exchange("noloco(4,rate=0.7,momentum=0)").merge == "outer-pairs"


def test_all_other_combinations_compose() -> None:
    for name in NAMES:
        for compressor in COMPRESSORS:
            if name == "noloco" and compressor in ("onebit", "ternary", "adaptive"):
                assert parse_exchange(f"{name}+{compressor}").payload == "difference"
            elif name not in ("asgd", "noloco") or compressor in ("bf16", "fp16", "int8"):
                assert parse_exchange(f"{name}+{compressor}").compressor == compressor


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=19),
    st.sampled_from(["hierarchical", "tree", "star"]),
    st.booleans(),
)
def test_routes_deliver_the_sum_to_all_ranks(
    nodes: list[int], topology: str, compressed: bool
) -> None:
    node_of = np.array(nodes, np.int32)
    ranks = len(nodes)
    lists = [route(topology, rank, node_of, compressed) for rank in range(ranks)]
    # A value is the set of ranks that it sums, which shows if a rank is added twice.
    held = [{rank} for rank in range(ranks)]
    wires: dict[tuple[int, int], list[set[int]]] = {}
    at, posted = [0] * ranks, [False] * ranks

    def step(rank: int) -> bool:
        if at[rank] == len(lists[rank]):
            return False
        kind, peer = lists[rank][at[rank]]
        if kind in ("send", "swap") and not posted[rank]:
            wires.setdefault((rank, peer), []).append(set(held[rank]))
            posted[rank] = True
            if kind == "send":
                at[rank], posted[rank] = at[rank] + 1, False
            return True
        if kind != "send" and wires.get((peer, rank)):
            arrived = wires[peer, rank].pop(0)
            if kind == "take":
                held[rank] = arrived
            else:
                assert not held[rank] & arrived
                held[rank] |= arrived
            at[rank], posted[rank] = at[rank] + 1, False
            return True
        return False

    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            moved |= step(rank)
    assert at == [len(each) for each in lists]
    assert held == [set(range(ranks))] * ranks
    assert not any(wires.values())


def test_a_tree_has_logarithmic_depth_and_a_star_has_one_server() -> None:
    node_of = np.arange(16, dtype=np.int32)
    assert max(len(route("tree", rank, node_of)) for rank in range(16)) == 8
    assert len(route("star", 0, node_of)) == 30
    assert route("star", 5, node_of) == [Op("send", 0), Op("take", 0)]
    # Four nodes of four ranks: three adds, two swaps, three sends.
    kinds = [op.kind for op in route("hierarchical", 0, node_of // 4)]
    assert kinds == ["add"] * 3 + ["swap"] * 2 + ["send"] * 3
