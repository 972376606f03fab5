"""A multilayer perceptron, for tables and small images."""

from torch import nn


class Mlp(nn.Sequential):
    """Linear layers with layer normalisation and ReLU, and a linear output.

    Layer normalisation (Ba et al., arXiv 1607.06450) rather than that of batches: it does not
    depend on which samples come together. Input: float32 (n, ...), flattened to (n, inputs), those
    of an image by default; output: (n, classes). There are `depth` hidden layers of `width`
    neurons, which a training step leaves out with the probability `dropout`.
    """

    def __init__(
        self,
        classes: int,
        image_size: int = 64,
        inputs: int | None = None,
        width: int = 256,
        depth: int = 3,
        dropout: float = 0.0,
    ) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        before = 3 * image_size**2 if inputs is None else inputs
        for _ in range(depth):
            layers += [nn.Linear(before, width), nn.LayerNorm(width), nn.ReLU()]
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            before = width
        super().__init__(*layers, nn.Linear(before, classes))
