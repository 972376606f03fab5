"""Export a trained model, and measure the file before it gets its name."""

import io
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Final

import torch

from dlio.errors import DlioError
from dlio.features.export.check_pictures import LabelledPictures, read_pictures
from dlio.features.export.export_options import ExportOptions
from dlio.features.export.layer_graph import LayerGraph, trace_network
from dlio.features.export.nir_graph import activation_scales, import_nir, simulate, spiking_graph
from dlio.features.export.onnx_file import BATCH, OnnxModel, to_onnx
from dlio.features.export.ternary import Ternary, ternary_network, tune_ternary
from dlio.features.export.trained_model import TrainedModel, load_trained
from dlio.train.model import normalised
from dlio.util.units import counted, format_bytes
from dlio.util.whole_files import write_json, write_whole

_RANDOM: Final = 7
"""Random pictures that each file is compared on; odd, so that the batch of the file must vary."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Figures of an export. Accuracies are 0 to 1, None without --check."""

    output: str
    format: str
    bytes: int
    model: str
    classes: int
    image_size: int
    parameters: int
    difference: float
    """Largest difference between logits of the file (for NIR: of the network it was made from) and
    of the model, as a share of the model's largest logit."""
    samples: int
    """Held-out samples."""
    accuracy_model: float | None = None
    accuracy_onnx: float | None = None
    accuracy_ternary: float | None = None
    accuracy_spiking: dict[int, float] | None = None
    """By the number of time steps."""
    neurons: int | None = None
    spikes_per_picture: float | None = None
    """Over all neurons and time steps."""
    nonzero: float | None = None
    """Share of ternary weights that are not 0."""


def export_model(options: ExportOptions, say: Say = lambda _: None) -> ExportReport:
    """Write a trained model as ONNX or NIR.

    The file appears under its name when it has passed its checks, and not at all otherwise. `say`
    shows a line of progress or results.

    Raises UsageError for unsuitable options or a model that the format cannot express, SourceError
    if weights or data cannot be read, DlioError if the file's answers differ from the model's.
    """
    options.check_files()
    trained = load_trained(options.weights, options.model, options.classes, options.image_size)
    parameters = sum(each.numel() for each in trained.module.parameters())
    say(
        f"{trained.path}: {trained.model}, {counted(trained.classes, 'class')}, "
        f"{trained.image_size} pixels, {counted(parameters, 'parameter')}"
    )
    held_out = None
    if options.check is not None:
        size, count = trained.image_size, options.check_samples
        held_out = read_pictures("--check", options.check, trained.classes, size, count)
    report = ExportReport(
        output=options.output,
        format=options.kind,
        bytes=0,
        model=trained.model,
        classes=trained.classes,
        image_size=trained.image_size,
        parameters=parameters,
        difference=0.0,
        samples=0 if held_out is None else len(held_out),
    )
    # Its other figures come with the file.
    work = _onnx if options.kind == "onnx" else _nir
    report, packed = work(options, trained, report, held_out, say)
    report = replace(report, bytes=len(packed))
    write_whole(options.output, lambda file: file.write(packed))
    say(f"{options.output}: {format_bytes(len(packed))}")
    if options.report is not None:
        write_json(options.report, asdict(report))
    return report


def _onnx(
    options: ExportOptions,
    trained: TrainedModel,
    report: ExportReport,
    held_out: LabelledPictures | None,
    say: Say,
) -> tuple[ExportReport, bytes]:
    packed = to_onnx(trained, options.input, () if held_out is None else held_out.names)
    exported = OnnxModel(packed)
    drawn = _random_pictures(trained.image_size)
    expected, given = _logits(trained, drawn), exported.logits(drawn)
    before, after = None, None
    if held_out is not None:
        right, answers = _logits(trained, held_out.images), exported.logits(held_out.images)
        before, after = held_out.accuracy(right), held_out.accuracy(answers)
        expected, given = torch.cat([expected, right]), torch.cat([given, answers])
    difference = _check_difference(expected, given, options, "the ONNX file")
    say(
        f"onnxruntime: logits differ from torch's by {difference:.1e} of the largest at most, on "
        f"{counted(len(expected), 'picture')}"
    )
    if held_out is not None:
        say(
            f"held-out accuracy on {counted(len(held_out), 'sample')}: model {before:.2%}, "
            f"ONNX file {after:.2%}"
        )
    report = replace(
        report,
        difference=difference,
        accuracy_model=before,
        accuracy_onnx=after,
    )
    return report, packed


def _nir(
    options: ExportOptions,
    trained: TrainedModel,
    report: ExportReport,
    held_out: LabelledPictures | None,
    say: Say,
) -> tuple[ExportReport, bytes]:
    nir = import_nir()
    network = trace_network(trained.module, trained.image_size)
    drawn = _random_pictures(trained.image_size)
    difference = _check_difference(
        _logits(trained, drawn), _network_logits(network, drawn), options, "the traced network"
    )
    assert options.calibrate is not None
    calibration = read_pictures(
        "--calibrate",
        options.calibrate,
        trained.classes,
        trained.image_size,
        options.calibration_samples,
    )
    rounded = network
    ternary: dict[str, Ternary] = {}
    if options.ternary:
        if options.tune_epochs:
            rounded = tune_ternary(network, calibration, options.tune_epochs, say)
        rounded, ternary = ternary_network(rounded)
    scales = activation_scales(rounded, calibration, options.percentile)
    buffer = io.BytesIO()
    nir.write(buffer, spiking_graph(rounded, scales, ternary))
    packed = buffer.getvalue()
    # The graph as a reader of the file has it.
    shown = calibration.images[:_RANDOM] if held_out is None else held_out.images
    graph = nir.read(io.BytesIO(packed))
    say(f"nirtorch: {counted(len(shown), 'picture')} for {counted(options.steps, 'step')} ...")
    # The answers are read after an eighth of the steps, a quarter, half and all.
    moments = sorted({max(1, options.steps // part) for part in (8, 4, 2, 1)})
    simulated = simulate(graph, shown, moments, options.reset)
    last = simulated.logits[options.steps]
    if not bool(last.isfinite().all()):
        raise DlioError(f"{options.output}: the graph's answers are not finite; check the weights")
    signs = [each.signs.flatten() for each in ternary.values()]
    report = replace(
        report,
        difference=difference,
        neurons=simulated.neurons,
        spikes_per_picture=simulated.spikes,
        nonzero=float(torch.cat(signs).double().abs().mean()) if signs else None,
    )
    if held_out is not None:
        report = replace(
            report,
            accuracy_model=held_out.accuracy(_logits(trained, held_out.images)),
            accuracy_spiking={
                steps: held_out.accuracy(logits) for steps, logits in simulated.logits.items()
            },
        )
        if options.ternary:
            answers = _network_logits(rounded, held_out.images)
            report = replace(report, accuracy_ternary=held_out.accuracy(answers))
    _tell_nir(report, options, say)
    return report, packed


def _tell_nir(report: ExportReport, options: ExportOptions, say: Say) -> None:
    say(
        f"spiking network: {report.neurons:,} neurons, {report.spikes_per_picture:,.0f} spikes for "
        f"a picture in {counted(options.steps, 'step')}"
    )
    if report.nonzero is not None:
        say(f"ternary weights: {report.nonzero:.0%} are not 0")
    if report.accuracy_spiking is None:
        return
    parts = [f"model {report.accuracy_model:.2%}"]
    if report.accuracy_ternary is not None:
        parts.append(f"ternary {report.accuracy_ternary:.2%}")
    parts += [
        f"spiking after {counted(steps, 'step')} {accuracy:.2%}"
        for steps, accuracy in report.accuracy_spiking.items()
    ]
    say(f"held-out accuracy on {counted(report.samples, 'sample')}: {', '.join(parts)}")


def _random_pictures(image_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (_RANDOM, 3, image_size, image_size)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@torch.no_grad()
def _logits(trained: TrainedModel, images: torch.Tensor) -> torch.Tensor:
    parts = torch.split(images, BATCH)
    return torch.cat([trained.module(normalised(batch, batch.device)) for batch in parts])


@torch.no_grad()
def _network_logits(network: LayerGraph, images: torch.Tensor) -> torch.Tensor:
    return torch.cat([network.logits(batch.float() / 255) for batch in torch.split(images, BATCH)])


def _check_difference(
    expected: torch.Tensor, given: torch.Tensor, options: ExportOptions, who: str
) -> float:
    """Return the largest difference as a share of the largest logit. Raises DlioError."""
    if expected.shape != given.shape or not bool(expected.isfinite().all()):
        raise DlioError(
            f"{options.weights}: the model's logits {tuple(expected.shape)} are not finite, or "
            f"{who} gives {tuple(given.shape)}"
        )
    largest = float(expected.abs().max())
    difference = float((expected - given).abs().max()) / max(largest, 1e-12)
    if not difference <= options.tolerance:
        raise DlioError(
            f"{options.output}: logits of {who} differ from the model's by {difference:.1e} of the "
            f"largest, over --tolerance {options.tolerance:g}; nothing was written"
        )
    return difference
