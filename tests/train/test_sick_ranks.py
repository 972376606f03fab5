"""Ranks that compute slowly, and weights that differ: the decisions."""

import pytest
import torch
from torch import nn

from dlio.exchange.exchange_spec import NAMES, parse_exchange
from dlio.train.callbacks.slow_rank_guard import slow_ranks
from dlio.train.callbacks.weight_guard import majority, weights_digest


def test_a_rank_is_slow_at_less_than_a_fifth_of_the_others_speed() -> None:
    assert slow_ranks([100, 100, 19, 100]) == [(2, 100 / 19)]
    assert slow_ranks([100, 19]) == [(1, 100 / 19)]
    assert slow_ranks([100, 20, None, 0]) == []
    assert slow_ranks([19]) == slow_ranks([None, None]) == []


@pytest.mark.parametrize(
    ("digests", "usual"),
    [
        ([7, 7, 5], 7),
        ([5, 7, 7], 7),
        ([7], 7),
        ([7, 5], None),
        ([7, 7, 5, 5], None),
        ([7, 7, 5, 3], None),
        ([-7, -7, -7, 3], -7),
    ],
)
def test_weights_of_more_than_half_of_the_ranks_are_right(
    digests: list[int], usual: int | None
) -> None:
    assert majority(digests) == usual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_is_of_every_bit_of_the_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 6))
    model = layers.to(memory_format=torch.channels_last).to(dtype)  # type: ignore[call-overload]
    model.register_parameter("scale", nn.Parameter(torch.ones((), dtype=dtype)))
    before = weights_digest(model)
    assert before == weights_digest(model)
    assert -(2**63) <= before < 2**63
    digests = {before}
    for parameter in model.parameters():
        flat = parameter.detach()
        places = [0] * flat.dim(), [-1] * flat.dim()
        for place in places:
            bits = flat.view(torch.int32 if dtype == torch.float32 else torch.int16)
            bits[tuple(place)] ^= 1
            digests.add(weights_digest(model))
            bits[tuple(place)] ^= 1
    assert len(digests) == 1 + 2 * 4 + 1  # The last is a single number.
    assert weights_digest(model) == before


def test_exchanges_that_sum_gradients_keep_ranks_alike() -> None:
    alike = {name for name in NAMES if parse_exchange(name).alike}
    assert alike == {"allreduce", "hierarchical", "tree", "parameter-server"}
    assert not parse_exchange("gossip(gradient)").alike
    assert parse_exchange("tree+onebit").alike
