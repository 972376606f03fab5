"""`--decode device`: a run's batches are those of the CPU, on the device that trains."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.image.device_decode.nvimagecodec import is_installed
from dlio.train.config import train_config
from dlio.train.rank_layout import RankLayout
from dlio.train.training_data import RunData


def _batches(folder: Path, training: bool, **options: Any) -> list[tuple[Any, Any]]:
    config = train_config(str(folder), image_size=64, batch_size=5, **options)
    sources = RunData(config, RankLayout(SingleCommunicator()))
    with (
        sources.open(config.data.source, "none", training) as data,
        sources.loader(data, training, torch.device("cpu")) as loader,
    ):
        made = [(images.clone(), labels.clone()) for images, labels in loader]
        counts = loader.stats()
        assert (counts["device_images"] > 0) == (config.batches.decode == "device")
        return made


@pytest.mark.skipif(not is_installed(), reason="nvImageCodec is not installed (extra gpu)")
@pytest.mark.parametrize("training", [True, False])
def test_batches_are_those_of_the_cpu(pictures: Path, training: bool) -> None:
    options = {"mixup": 0.4} if training else {}
    wanted = _batches(pictures / "train", training, **options)
    made = _batches(pictures / "train", training, decode="device", **options)
    for (images, labels), (theirs, numbers) in zip(made, wanted, strict=True):
        assert torch.equal(labels, numbers)
        assert (images.double() - theirs.double()).abs().mean() <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": "ram:1MiB:decoded"}, "--tiers ram:1MiB:decoded"),
        ({"replay": "trace.jsonl"}, "--replay"),
    ],
)
def test_what_the_cpu_decodes_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"--decode device does not go with {message}"):
        train_config("pictures", decode="device", **options)
