"""`dlio export`: a trained model for other hardware."""

from dlio.cli.option_groups import with_help
from dlio.features.export.export_options import ExportOptions
from dlio.util.printable import print_line


@with_help(
    "dlio export weights.pt model.onnx --check /data/val",
    "dlio export ckpt model.onnx --input float32",
    "dlio export weights.pt model.nir --calibrate /data/train --check /data/val",
    "dlio export w.pt w.nir --calibrate /data/train --ternary --tune-epochs 3",
    groups={
        "Model": ("weights", "model", "classes", "image_size"),
        "File": ("output", "format", "input", "report"),
        "Checks": ("check", "check_samples", "tolerance"),
        "Spiking networks (NIR)": (
            *("calibrate", "calibration_samples", "percentile", "steps", "reset"),
            *("ternary", "tune_epochs"),
        ),
    },
    usual=(
        *("weights", "output", "model", "image_size", "format"),
        ("input", "Pixels of 0 to 255, or float32: normalised by the caller"),
        ("check", "Held-out data, on which the file's accuracy is measured"),
        "calibrate",
    ),
)
def command(options: ExportOptions) -> None:
    """Write a trained model as ONNX, or as a spiking network in NIR.

    ONNX files take pictures as uint8 and normalise them; onnxruntime compares each file with the
    model. NIR graphs of integrate-and-fire neurons are simulated step by step. The file appears
    when it has passed.
    """
    from dlio.features.export.model_export import export_model

    export_model(options, print_line)
