"""Classify the operations between a layer and its consumers by their autograd names."""

from typing import Final

from dlio.features.pruning.neuron_groups import Activation

IDENTITY: Final = Activation("identity", 1.0, True)
OTHER: Final = Activation("other", float("inf"), False)
_KINDS: Final = {
    "relu": Activation("relu", 1.0, True),
    "sigmoid": Activation("sigmoid", 0.25, False),
    "tanh": Activation("tanh", 1.0, False),
    # Upper bounds of the slopes of x Phi(x), its tanh approximation, and x sigmoid(x).
    "gelu": Activation("gelu", 1.13, False),
    "silu": Activation("silu", 1.1, False),
    "softplus": Activation("softplus", 1.0, False),
    "hardtanh": Activation("hardtanh", 1.0, False),
    "logsigmoid": Activation("logsigmoid", 1.0, False),
}
_NEUTRAL: Final = (
    # These move, select or average values within each channel. They have slope 1 at most and
    # commute with positive factors.
    *("view", "unsafeview", "reshape", "transpose", "permute", "squeeze", "unsqueeze"),
    *("tbackward", "clone", "alias", "tocopy", "mean", "maxpool", "avgpool", "adaptiveavgpool"),
    *("cat", "adaptivemaxpool", "mkldnnmaxpool", "mkldnnadaptiveavgpool"),
)


def classify(grad_fn: object) -> Activation | None:
    """Return the activation of an autograd node.

    None for an operation that leaves each channel's values in proportion, such as a reshape or a
    pooling; OTHER for an unknown operation.
    """
    name = str(grad_fn.name()).lower() if hasattr(grad_fn, "name") else ""
    if name.startswith("leakyrelu"):
        slope = abs(float(getattr(grad_fn, "_saved_negative_slope", float("inf"))))
        return Activation("leaky_relu", max(1.0, slope), True)
    for kind, activation in _KINDS.items():
        if name.startswith(kind):
            return activation
    if name.lstrip("_").startswith(_NEUTRAL):
        return None
    return OTHER
