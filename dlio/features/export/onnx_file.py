"""Write a model as ONNX, and compare the file with the model by onnxruntime."""

import json
import logging
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dlio.errors import DlioError, UsageError
from dlio.features.export.trained_model import TrainedModel
from dlio.train.model import PIXEL_MEAN, PIXEL_STD, normalised
from dlio.util.extras import how_to_install
from dlio.util.printable import first_line

INPUT_NAME: Final = "images"
OUTPUT_NAME: Final = "logits"
BATCH: Final = 64
"""Pictures that are computed at a time."""
_MOST_BYTES: Final = (1 << 31) - 1


class _ExportWrapper(nn.Module):
    """A model whose input has the name of the file's, and is uint8 pixels to normalise if asked."""

    def __init__(self, model: nn.Module, is_of_pixels: bool) -> None:
        super().__init__()
        self.model, self.is_of_pixels = model, is_of_pixels
        # Not `normalised`, which would keep tensors of the exporter's tracing for later calls.
        for name, values in (("mean", PIXEL_MEAN), ("std", PIXEL_STD)):
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1) * 255)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.is_of_pixels:
            images = (images.float() - self.get_buffer("mean")) / self.get_buffer("std")
        logits: torch.Tensor = self.model(images)
        return logits


def to_onnx(trained: TrainedModel, kind: str, names: Sequence[str] = ()) -> bytes:
    """Return a model as an ONNX file.

    Its input `images` has shape (batch, 3, image_size, image_size) with any batch, its output
    `logits` (batch, classes). The kind of input is `uint8` to normalise pixels in the graph, or
    `float32` for normalised ones. The names of classes are kept in the file's metadata, as a JSON
    list under `classes`.

    Raises UsageError if onnx and onnxscript are not installed, or torch cannot export the model.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"ONNX needs onnx and onnxscript: {error}; {how_to_install('export')}"
        ) from error
    model = _ExportWrapper(trained.module, kind == "uint8")
    size = trained.image_size
    # Two pictures: of one, the exporter would take the batch for a constant.
    example = torch.zeros(2, 3, size, size, dtype=getattr(torch, kind))
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model.eval(),
                (example,),
                dynamo=True,
                verbose=False,
                input_names=[INPUT_NAME],
                output_names=[OUTPUT_NAME],
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            )
    except Exception as error:  # torch passes on any error of the model's own code.
        raise UsageError(
            f"torch cannot export --model {trained.model} to ONNX: {first_line(error)}; its "
            "forward must not branch on values"
        ) from error
    assert program is not None
    shape = program.model.graph.inputs[0].shape
    if shape is None or isinstance(shape[0], int):  # The exporter has fallen back to the example.
        raise UsageError(
            f"--model {trained.model}: its forward takes the size of the batch for a constant; "
            "write x.shape[0] in place of len(x) and int(...)"
        )
    if names:
        program.model.metadata_props["classes"] = json.dumps(list(names))
    packed: bytes = program.model_proto.SerializeToString()
    if len(packed) > _MOST_BYTES:
        raise UsageError("the model has over 2 GiB, more than one ONNX file can hold: prune it")
    return packed


class OnnxModel:
    """A packed ONNX file in onnxruntime, whose errors become DlioErrors.

    Raises UsageError if onnxruntime is not installed.
    """

    def __init__(self, packed: bytes) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise UsageError(
                f"the file is checked by onnxruntime: {error}; {how_to_install('export')}"
            ) from error
        self._session: Any = onnxruntime.InferenceSession(
            packed, providers=["CPUExecutionProvider"]
        )

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, classes) of pictures, uint8 (n, 3, image_size, image_size)."""
        (described,) = self._session.get_inputs()
        is_of_pixels = described.type == "tensor(uint8)"
        parts = []
        for batch in torch.split(images, BATCH):
            given = batch if is_of_pixels else normalised(batch, batch.device)
            try:
                (logits,) = self._session.run([OUTPUT_NAME], {INPUT_NAME: given.numpy()})
            except Exception as error:  # onnxruntime has errors of its own.
                raise DlioError(f"onnxruntime cannot run the model: {first_line(error)}") from error
            parts.append(torch.from_numpy(np.asarray(logits)))
        return torch.cat(parts)
