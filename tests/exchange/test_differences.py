"""The copies of a pair and the consensus momentum, in one process."""

import numpy as np
import pytest
import torch

from dlio.exchange.compress import make_compressor
from dlio.exchange.compress.message_layout import ChunkScratch, Piece
from dlio.exchange.pair_buffer import ConsensusMomentum, PairCopies

ROWS, WIDTH = 32, 256
ENTRIES = ROWS * WIDTH


def _copies(compressor: str) -> tuple[PairCopies, int]:
    """Return a rank's copies, and the length of its longest message."""
    pieces = [Piece("weight", 0, ROWS, WIDTH, small=False)]
    codecs = [make_compressor(name, pieces, ChunkScratch()) for name in (compressor, "bf16")]
    return PairCopies(*codecs), max(codec.max_bytes for codec in codecs)


class _Pair:
    """Two ranks that exchange without a network."""

    def __init__(self, compressor: str) -> None:
        (mine, longest), (theirs, _) = _copies(compressor), _copies(compressor)
        self.copies = (mine, theirs)
        self._longest = longest

    def moves(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """Exchange once; return both ranks' moves."""
        messages = []
        for copies, each in zip(self.copies, weights, strict=True):
            message = np.empty(self._longest, np.uint8)
            messages.append(message[: copies.encode(1, each, message)])
        moves = []
        for copies, message in zip(self.copies, reversed(messages), strict=True):
            into = torch.full((ENTRIES,), torch.nan)
            copies.add(1, message, into)
            moves.append(into)
        return moves


@pytest.mark.parametrize("compressor", ["onebit", "ternary", "adaptive"])
def test_a_pair_keeps_equal_copies_and_its_mean_and_meets(compressor: str) -> None:
    generator = torch.Generator().manual_seed(3)
    pair = _Pair(compressor)
    weights = [torch.randn(ENTRIES, generator=generator) for _ in range(2)]
    pair.moves(weights)  # Whole weights.
    for each in weights:
        each += torch.randn(ENTRIES, generator=generator)
    mean = (weights[0] + weights[1]) / 2
    apart = []
    for _ in range(120):
        moves = pair.moves(weights)
        assert torch.equal(moves[0], -moves[1])
        for each, move in zip(weights, moves, strict=True):
            each += move
        kept = [copies.state()["1"] for copies in pair.copies]
        assert torch.equal(*kept)
        apart.append(float((weights[0] - weights[1]).norm()))
    assert apart[-1] < 0.06 * apart[0]
    assert max(np.diff(apart)) < 0.02 * apart[0], "what messages leave out does not grow"
    assert float(((weights[0] + weights[1]) / 2 - mean).abs().max()) < 1e-4


def test_the_first_message_to_a_partner_and_the_one_after_a_loss_hold_whole_weights() -> None:
    pair = _Pair("adaptive")
    weights = [torch.randn(ENTRIES) for _ in range(2)]
    for _ in range(2):
        moves = pair.moves(weights)
        exact = (weights[1] - weights[0]) / 2
        assert float((moves[0] - exact).abs().max()) < 0.02
        for copies in pair.copies:
            copies.clear()


def test_copies_of_an_older_version_begin_anew() -> None:
    copies, _ = _copies("onebit")
    copies.load_state({"mine/1/5": torch.ones(ENTRIES)})
    assert copies.state() == {}


@pytest.mark.parametrize("coasts", [False, True])
def test_momentum_carries_on_by_a_share_of_the_move(coasts: bool) -> None:
    momentum = ConsensusMomentum(torch.zeros(3), share=1.5, decay=0.8)
    move = torch.tensor([1.0, -2.0, 0.0])
    first = move.clone()
    momentum.move(first)
    assert torch.equal(first, move), "an exchange's own move is not delayed"
    further = torch.zeros(3)
    for _ in range(100):
        if coasts:
            further += momentum.coast()
        else:
            later = torch.zeros(3)
            momentum.move(later)
            further += later
    assert torch.allclose(further, 1.5 * move, atol=1e-5)
