"""Bytes of checkpoints, compared with the models' published numbers of parameters."""

import pytest

from dlio.errors import UsageError
from dlio_bench.checkpoint_cases.checkpoint_command import MODELS, checkpoint_bytes


@pytest.mark.parametrize(
    ("model", "parameters"), [("llama_8b", 8.03e9), ("llama_70b", 70.6e9), ("llama_405b", 405.9e9)]
)
def test_language_models_have_their_published_parameters(model: str, parameters: float) -> None:
    assert MODELS[model] / 14 == pytest.approx(parameters, rel=0.005)


def test_ranks_share_a_checkpoint() -> None:
    whole = checkpoint_bytes("unet3d", 1, 1.0)
    assert whole == 499_153_191
    assert checkpoint_bytes("unet3d", 4, 0.5) == pytest.approx(whole / 8, abs=1)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean resnet50"):
        checkpoint_bytes("resnet5", 1, 1.0)
