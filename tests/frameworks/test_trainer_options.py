"""Options of Hugging Face's Trainer that concern its loaders: followed by the mixin, or refused."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from dlio.errors import UsageError
from dlio.integrations import TrainerMixin


@pytest.fixture(autouse=True)
def _without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    # Loaders of a process that has imported it are made otherwise, those of later tests, too.
    monkeypatch.setattr("dlio.loader.third_party.accelerate.prepare", lambda: None)


class ForeignTrainer:
    """A Trainer, as far as the mixin reads it."""

    def __init__(self, data: Any, split_batches: bool = False, **options: Any) -> None:
        self.train_dataset = self.eval_dataset = data
        self.data_collator = list
        self._train_batch_size = 4
        self.args = SimpleNamespace(
            **{
                "dataloader_num_workers": 0,
                "dataloader_pin_memory": False,
                "dataloader_drop_last": False,
                "eval_batch_size": 4,
                "seed": 1,
                "data_seed": None,
                "device": torch.device("cpu"),
                "world_size": 2,
                "train_sampling_strategy": "random",
                **options,
            }
        )
        self.accelerator = SimpleNamespace(split_batches=split_batches, prepare=lambda made: made)

    def _get_collator_with_removed_columns(self, collate: Any, description: str) -> Any:
        assert description
        return collate

    def get_train_dataloader(self) -> str:
        return "Trainer's own"

    def get_eval_dataloader(self, data: Any) -> str:
        return "Trainer's own"


class MixedTrainer(TrainerMixin, ForeignTrainer):
    pass


class SamplingTrainer(MixedTrainer):
    def _get_train_sampler(self) -> list[int]:
        return [1, 0]

    def _get_eval_sampler(self, data: Any) -> list[int]:
        return [1, 0]


class ThreeNumbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        (
            MixedTrainer,
            {"train_sampling_strategy": "group_by_length"},
            "'group_by_length'.*'random'",
        ),
        (MixedTrainer, {"group_by_length": True}, "'group_by_length'.*'random'"),
        (SamplingTrainer, {}, r"SamplingTrainer\._get_train_sampler .*remove it"),
        (MixedTrainer, {"split_batches": True}, "split_batches .*accelerator_config"),
    ],
)
def test_what_the_loader_does_not_follow_is_refused(
    kind: type[Any], options: dict[str, Any], names: str
) -> None:
    with pytest.raises(UsageError, match=names):
        kind(range(8), **options).get_train_dataloader()


def test_a_sampler_of_the_evaluation_is_refused() -> None:
    with pytest.raises(UsageError, match=r"SamplingTrainer\._get_eval_sampler"):
        SamplingTrainer(range(8)).get_eval_dataloader()


def test_samples_come_in_order_if_they_are_to() -> None:
    in_order: Any = MixedTrainer(range(8), train_sampling_strategy="sequential")
    assert list(in_order.get_train_dataloader()) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    shuffled: Any = MixedTrainer(range(8))
    samples = [each for batch in shuffled.get_train_dataloader() for each in batch]
    assert samples != sorted(samples) == list(range(8))


def test_an_iterable_data_set_is_left_to_trainer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dlio")
    trainer: Any = MixedTrainer(ThreeNumbers())
    assert trainer.get_train_dataloader() == trainer.get_eval_dataloader() == "Trainer's own"
    assert "iterable data set" in caplog.text
