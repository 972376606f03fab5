"""The options of `dlio export`."""

import os
from dataclasses import dataclass
from typing import Annotated, Final

from dlio.errors import UsageError
from dlio.train.train_options import MIN_IMAGE_SIZE
from dlio.util.options import Option, check
from dlio.util.whole_files import check_writable

FORMATS: Final = ("onnx", "nir")
"""File formats, which are suffixes of file names, too."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """One export of a trained model."""

    weights: Annotated[
        str,
        Option(
            "Weights that `dlio train --save` wrote, or a folder of checkpoints, whose newest "
            "intact one is taken.",
            positional=True,
            metavar="WEIGHTS",
        ),
    ]
    output: Annotated[
        str,
        Option("File to write, such as model.onnx or model.nir.", positional=True, metavar="OUT"),
    ]
    format: Annotated[
        str | None,
        Option("Format of the file.", choices=FORMATS, default_text="the suffix of OUT"),
    ] = None
    model: Annotated[
        str | None,
        Option(
            "Model that was trained, as in `dlio train`.",
            metavar="MODEL",
            default_text="the checkpoint's, or resnet",
        ),
    ] = None
    classes: Annotated[
        int | None,
        Option("Number of classes.", least=1, default_text="the weights'"),
    ] = None
    image_size: Annotated[
        int | None,
        Option(
            "Side of the pictures that the model was trained on.",
            unit="pixels",
            least=MIN_IMAGE_SIZE,
            default_text="the checkpoint's, or 64",
        ),
    ] = None
    input: Annotated[
        str,
        Option(
            "Input of an ONNX model. uint8: pixels of 0 to 255; the model normalises them. "
            "float32: pixels that the caller has normalised as `dlio train` does.",
            choices=("uint8", "float32"),
        ),
    ] = "uint8"
    check: Annotated[
        str | None,
        Option(
            "Held-out data set of the classes that the model was trained on: the accuracy of the "
            "file is measured and printed.",
            metavar="DATA",
        ),
    ] = None
    check_samples: Annotated[
        int,
        Option("Samples of --check to take, at random; the same ones in each run.", least=1),
    ] = 1000
    tolerance: Annotated[
        float,
        Option(
            "Largest difference between logits of the file and of the model, as a share of the "
            "largest logit; a greater one is an error.",
            above=0,
        ),
    ] = 1e-3
    calibrate: Annotated[
        str | None,
        Option(
            "Training data whose activations set the scale of spike rates; needed for NIR.",
            metavar="DATA",
        ),
    ] = None
    calibration_samples: Annotated[
        int, Option("Samples of --calibrate to take, at random.", least=1)
    ] = 512
    percentile: Annotated[
        float,
        Option(
            "Percentile of a layer's activations that becomes the highest spike rate, one spike "
            "in each time step.",
            above=0,
            most=100,
        ),
    ] = 99.9
    steps: Annotated[
        int, Option("Time steps for which spiking networks are simulated.", least=1)
    ] = 128
    reset: Annotated[
        str,
        Option(
            "Potential of a simulated neuron after a spike. subtract: the threshold is subtracted, "
            "as most programs do. zero: 0, as the definition of NIR has it.",
            choices=("subtract", "zero"),
        ),
    ] = "subtract"
    ternary: Annotated[
        bool, Option("Round the weights of a NIR graph to -1, 0 and 1, times a scale per output.")
    ] = False
    tune_epochs: Annotated[
        int,
        Option(
            "Epochs over the calibration samples in which weights learn to be ternary.",
            least=0,
            needs="ternary",
        ),
    ] = 0
    report: Annotated[
        str | None, Option("Write the figures as JSON to this file.", metavar="FILE")
    ] = None

    def __post_init__(self) -> None:
        check(self)
        if self.kind == "nir" and self.calibrate is None:
            raise UsageError(
                "--calibrate DATA is missing: spike rates are scaled by the activations of "
                "training data"
            )
        if self.kind == "onnx":
            for option, value in (("--ternary", self.ternary), ("--calibrate", self.calibrate)):
                if value:
                    raise UsageError(f"{option} is for NIR: name OUT model.nir, or leave it out")

    @property
    def kind(self) -> str:
        """The format, `onnx` or `nir`. Raises UsageError if the name of the file has no suffix."""
        if self.format is not None:
            return self.format
        suffix = os.path.splitext(self.output)[1].removeprefix(".").lower()
        if suffix not in FORMATS:
            raise UsageError(
                f"OUT {self.output}: name it model.onnx or model.nir, or choose --format"
            )
        return suffix

    def check_files(self) -> None:
        """Raise UsageError if a file cannot be written, or would replace the weights."""
        check_writable("OUT", self.output)
        if os.path.realpath(self.output) == os.path.realpath(self.weights):
            raise UsageError(f"OUT {self.output}: these are the weights; name another file")
        if self.report is not None:
            check_writable("--report", self.report)
