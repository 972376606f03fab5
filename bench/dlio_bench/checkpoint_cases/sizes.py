"""Bytes of checkpoints by model. Pure.

A checkpoint holds the model and the optimizer's state. Large language models are counted as DLIO
counts them in its workloads of ZeRO stage 3: 2 bytes a parameter for the model in half precision,
12 for the optimizer's float32 copy and two moments, divided among the ranks. Shapes of Llama 3:
Dubey et al., "The Llama 3 Herd of Models" (2024), table 3; `1t` is MLPerf Storage's.
"""

from typing import Final

from dlio.errors import UsageError
from dlio.util.arguments import nearest

_HALF, _OPTIMIZER = 2, 12
_VOCABULARY: Final = 128256


def _parameters(layers: int, hidden: int, feed_forward: int, heads: int, key_heads: int) -> int:
    """Parameters of a decoder-only transformer with grouped queries and a gated feed-forward
    network; input and output embeddings are separate."""
    keys = hidden * key_heads // heads
    layer = 2 * hidden * (hidden + keys) + 3 * hidden * feed_forward + 2 * hidden
    return layers * layer + 2 * _VOCABULARY * hidden + hidden


_DECODERS: Final = {
    "llama_8b": _parameters(32, 4096, 14336, 32, 8),
    "llama_70b": _parameters(80, 8192, 28672, 64, 8),
    "llama_405b": _parameters(126, 16384, 53248, 128, 8),
    "llama_1t": _parameters(128, 25872, 98304, 192, 32),
}
MODELS: Final[dict[str, int]] = {
    # float32 weights and momentum of 25.6 million parameters; He et al. (2015).
    "resnet50": 2 * 4 * 25_557_032,
    # DLIO, configs/workload/unet3d_h100.yaml: model.model_size.
    "unet3d": 499_153_191,
    **{name: (_HALF + _OPTIMIZER) * each for name, each in _DECODERS.items()},
}
"""Bytes of all ranks' checkpoint, by model."""


def checkpoint_bytes(model: str, ranks: int, scale: float) -> int:
    """Return the bytes that one rank writes.

    Args:
        model: one of MODELS.
        scale: share of the model's bytes.

    Raises UsageError for an unknown model.
    """
    if model not in MODELS:
        raise UsageError(
            f"--model {model}: choose one of {', '.join(MODELS)}{nearest(model, MODELS)}"
        )
    return max(1, round(MODELS[model] * scale / ranks))
