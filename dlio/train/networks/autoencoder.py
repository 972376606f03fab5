"""A stacked convolutional autoencoder, and a classifier on its encoder.

Layers are trained one after another, each to reconstruct the output of the layer before it, which
stays as it is (greedy layer-wise pre-training: Bengio et al., "Greedy Layer-Wise Training of Deep
Networks", 2007; Vincent et al., "Stacked Denoising Autoencoders", 2010, for `noise`).
"""

from typing import Final

import torch
from torch import nn

from dlio.errors import UsageError

_WIDEST: Final = 256
_CHANNELS, _NEURONS = 32, 512
_USUAL_DEPTH: Final = 4
_LEAST_SIDE: Final = 4
"""Pixels of the smallest code."""


class _Norm(nn.Module):
    """Batch normalisation of neurons; a batch of one sample uses the running statistics.

    Input and output: (n, neurons).
    """

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(neurons)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        # One sample has no variance. With --batch-norm sync, the class is another: it uses those of
        # all ranks.
        if self.training and len(x) == 1 and type(norm) is nn.BatchNorm1d:
            return nn.functional.batch_norm(
                x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
            )
        normalised: torch.Tensor = norm(x)
        return normalised


def _layer(inputs: int, outputs: int, dense: bool) -> nn.Sequential:
    """Return a layer of an encoder, with batch normalisation and ReLU.

    Of all pixels or neurons, (n, ...) -> (n, outputs); or a convolution of stride 2, which halves
    the sides of (n, inputs, h, w), rounded up.
    """
    if dense:
        linear = nn.Linear(inputs, outputs, bias=False)
        return nn.Sequential(nn.Flatten(), linear, _Norm(outputs), nn.ReLU())
    convolution = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class _Decoder(nn.Module):
    """The mirror of one layer of the encoder."""

    def __init__(self, inputs: int, outputs: int, dense: bool, is_last: bool) -> None:
        super().__init__()
        self.up: nn.Module = (
            nn.Linear(inputs, outputs, bias=is_last)
            if dense
            else nn.ConvTranspose2d(inputs, outputs, 3, 2, 1, bias=is_last)
        )
        norm = _Norm if dense else nn.BatchNorm2d
        self.rest = nn.Identity() if is_last else nn.Sequential(norm(outputs), nn.ReLU())

    def forward(self, x: torch.Tensor, like: torch.Size) -> torch.Tensor:
        # x: (n, inputs, ...) -> the shape `like`
        if isinstance(self.up, nn.Linear):
            dense: torch.Tensor = self.rest(self.up(x)).reshape(like)
            return dense
        out: torch.Tensor = self.rest(self.up(x, output_size=list(like[2:])))
        return out


class Autoencoder(nn.Module):
    """An encoder and its mirror. Input and output: float32 (n, 3, side, side), normalised.

    Each of the decoders is called with the output of its layer and the shape of the layer's input.
    In training, the share `noise` of a layer's inputs is set to 0.
    """

    def __init__(self, encoder: nn.Sequential, decoders: list[nn.Module], noise: float) -> None:
        super().__init__()
        self.encoder, self.decoders = encoder, nn.ModuleList(decoders)
        self._noise = noise
        self._layer: int | None = None

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.decoders)

    def choose_layer(self, layer: int | None) -> None:
        """Train and evaluate one layer, from 1, or all, as a `LayerwiseModel` does."""
        self._layer = layer
        if not self.training:
            return
        for number in range(self.depth):
            trains = layer is None or number == layer - 1
            for part in (self.encoder[number], self.decoders[number]):
                # Running statistics of a layer that is not trained stay, too.
                part.train(trains).requires_grad_(trains)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if self._layer is None:
            inputs, code = self._encoded(self._noisy(x), self.depth)
            return self._decoded(code, inputs)
        inputs, of = self._encoded(x, self._layer - 1)
        of = of.detach()
        code = self.encoder[self._layer - 1](self._noisy(of))
        made = self.decoders[self._layer - 1](code, of.shape)
        return (made, of) if self.training else (made, of, self._decoded(made, inputs))

    def _encoded(self, x: torch.Tensor, layers: int) -> tuple[list[torch.Size], torch.Tensor]:
        """Return (shape of each layer's input, output of the last of some layers)."""
        shapes = []
        for stage in list(self.encoder)[:layers]:
            shapes.append(x.shape)
            x = stage(x)
        return shapes, x

    def _decoded(self, code: torch.Tensor, shapes: list[torch.Size]) -> torch.Tensor:
        """Return the image of the code of some layers, whose inputs had these shapes."""
        for number in reversed(range(len(shapes))):
            code = self.decoders[number](code, shapes[number])
        return code

    def _noisy(self, x: torch.Tensor) -> torch.Tensor:
        # Without dropout's rescaling, which would shift the statistics of batch normalisation.
        if not self.training or not self._noise:
            return x
        return x * (torch.rand_like(x) >= self._noise)


class EncoderClassifier(nn.Module):
    """The encoder of an autoencoder, and a linear classifier of its code.

    Input: float32 (n, 3, image_size, image_size), normalised; output: logits (n, classes). The
    names of the encoder's weights are those in `Autoencoder`.
    """

    def __init__(self, encoder: nn.Sequential, code: int, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(code, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(x).flatten(1))
        return logits


def autoencoder(
    classes: int,
    image_size: int,
    reconstructs: bool = False,
    width: int | None = None,
    depth: int | None = None,
    noise: float = 0.0,
    dense: bool = False,
) -> nn.Module:
    """Make an autoencoder, or the classifier on its encoder that its weights fit.

    Args:
        width: channels of the first layer, by default 32; each further one has twice as many, up
            to 256. Of dense layers the neurons of each, by default 512.
        depth: layers of the encoder; None for up to 4, whose code is at least 4 pixels wide.
        dense: layers without convolution, as the classical stacked autoencoders have.
        noise: share of a layer's inputs that are set to 0 in training.
    """
    most = (image_size // _LEAST_SIDE).bit_length() - 1
    depth = min(_USUAL_DEPTH, most) if depth is None else depth
    width = (_NEURONS if dense else _CHANNELS) if width is None else width
    if depth < 1 or (depth > most and not dense):
        raise UsageError(
            f"--model autoencoder(depth={depth}): give 1 to {most} for images of {image_size} "
            "pixels, which each layer halves"
        )
    if width < 1 or not 0 <= noise < 1:
        raise UsageError(
            f"--model autoencoder(width={width}, noise={noise}): give a width of 1 or more, and a "
            "share of noise from 0 to below 1"
        )
    if dense:
        widths, pixels = [width] * depth, 3 * image_size**2
        before, code = [pixels, *widths[:-1]], width
    else:
        widths = [min(_WIDEST, width << k) for k in range(depth)]
        side = -(-image_size >> depth)  # Each convolution rounds up.
        before, code = [3, *widths[:-1]], widths[-1] * side**2
    pairs = list(zip(before, widths, strict=True))
    encoder = nn.Sequential(*(_layer(*pair, dense) for pair in pairs))
    decoders: list[nn.Module] = [
        _Decoder(outputs, inputs, dense, k == 0) for k, (inputs, outputs) in enumerate(pairs)
    ]
    if reconstructs:
        return Autoencoder(encoder, decoders, noise)
    return EncoderClassifier(encoder, code, classes)
