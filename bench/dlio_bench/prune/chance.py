"""A callback of `dlio train` that removes neurons by chance, when another run's rounds did."""

import json

import torch

from dlio.features.pruning.rounds import Round
from dlio.train.callbacks.callback_base import Callback, Run
from dlio_bench.prune.removal_case import ByChance


class Chance(Callback):
    """See `ByChance`."""

    def __init__(self, rounds: str, seed: int) -> None:
        with open(rounds, encoding="utf-8") as file:
            self._rounds = [
                Round(step=each["step"], parameters=0, widths=each["widths"])
                for each in json.load(file)
            ]
        self._seed = seed
        self._removal: ByChance | None = None

    def begins(self, run: Run) -> None:
        size = run.config.model.image_size
        self._removal = ByChance(
            run.model, torch.zeros(2, 3, size, size), self._rounds, self._seed, run.exchange.reshape
        )

    def after_step(self, run: Run) -> None:
        assert self._removal is not None
        if self._removal.step(run.updates, run.optimizer):
            run.reshaped()
