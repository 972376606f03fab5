"""What lies between a layer and those that read it, by the names that autograd gives."""

from typing import Any, Final

from dlio.train.pruning.groups import Activation

IDENTITY: Final = Activation("identity", 1.0, True)
OTHER: Final = Activation("other", float("inf"), False)
_KINDS: Final = {
    "relu": Activation("relu", 1.0, True),
    "sigmoid": Activation("sigmoid", 0.25, False),
    "tanh": Activation("tanh", 1.0, False),
    # The greatest slopes of x Phi(x), of its tanh form, and of x sigmoid(x).
    "gelu": Activation("gelu", 1.13, False),
    "silu": Activation("silu", 1.1, False),
    "softplus": Activation("softplus", 1.0, False),
    "hardtanh": Activation("hardtanh", 1.0, False),
    "logsigmoid": Activation("logsigmoid", 1.0, False),
}
_NEUTRAL: Final = (
    # Moves values, takes some or averages them over places: each channel by itself, no value
    # grows, and positive factors pass.
    *("view", "unsafeview", "reshape", "transpose", "permute", "squeeze", "unsqueeze"),
    *("tbackward", "clone", "alias", "tocopy", "mean", "maxpool", "avgpool", "adaptiveavgpool"),
    *("cat", "adaptivemaxpool", "mkldnnmaxpool", "mkldnnadaptiveavgpool"),
)


def classify(grad_fn: Any) -> Activation | None:
    """None for what changes nothing that matters here; OTHER for what is not known."""
    name = grad_fn.name().lower() if hasattr(grad_fn, "name") else ""
    if name.startswith("leakyrelu"):
        slope = abs(float(getattr(grad_fn, "_saved_negative_slope", float("inf"))))
        return Activation("leaky_relu", max(1.0, slope), True)
    for kind, activation in _KINDS.items():
        if name.startswith(kind):
            return activation
    if name.lstrip("_").startswith(_NEUTRAL):
        return None
    return OTHER
