"""Names that options of a training run take, and their defaults."""

from typing import Final

DEFAULT_MODEL: Final = "resnet"
"""Value of --model that stands for the usual model of the task."""
DEFAULT_OPTIMIZER: Final = "nesterov"
"""Optimizer of images with classes."""
TASK_NAMES: Final = ("classify", "regress", "autoencode", "segment", "table")
"""Tasks of `dlio.train.tasks.registry` that --task takes."""
USUAL_MODELS: Final = dict(
    zip(TASK_NAMES, (DEFAULT_MODEL, DEFAULT_MODEL, "autoencoder", "unet", "mlp"), strict=True)
)
"""Models by task, if --model names none."""
ARRAY_MODELS: Final = {"classify": "convnet", "regress": "convnet", "segment": "unet"}
"""The same for data sets of arrays, such as volumes."""
USUAL_OPTIMIZERS: Final = dict(
    zip(TASK_NAMES, (DEFAULT_OPTIMIZER, "adamw", "adamw", DEFAULT_OPTIMIZER, "adamw"), strict=True)
)
"""Optimizers by task, if --optimizer names none. The usual rate of nesterov needs a loss whose
gradient is bounded, which a squared error's is not."""
CALLBACKS: Final = {
    "prometheus": "dlio.train.callbacks.prometheus:Prometheus",
    "wandb": "dlio.train.callbacks.trackers:WandB",
    "mlflow": "dlio.train.callbacks.trackers:MLflow",
}
"""Callbacks that --callback takes by a name; both packages are the user's to install."""
