"""Stop a run, or skip steps, when the loss or a gradient is not finite."""

from typing import Final

import numpy as np
import torch

from dlio.errors import DlioError
from dlio.train.callbacks.callback_base import Callback, Run

_NAMED: Final = 3


class NanGuard(Callback):
    """Check the loss and the gradient norm before each optimizer step: skip it, or raise DlioError.

    On a GPU the error is raised one step late, so that no step waits for the device. Overflows that
    a loss scaler handles are ignored.
    """

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self._before: tuple[torch.Tensor, int] | None = None

    def before_step(self, run: Run) -> bool:
        finite = torch.isfinite(run.last_loss)
        if run.gradient_norm is not None and not run.precision.scales:
            finite = finite & torch.isfinite(run.gradient_norm).to(finite.device)
        if self._skip:
            return self._all_say(run, bool(finite))
        if finite.device.type == "cpu":
            if not finite:
                raise self._error(run, run.updates)
            return True
        before, self._before = self._before, (finite, run.updates)
        if before is not None and not before[0]:
            raise self._error(run, before[1])
        return True

    @staticmethod
    def _all_say(run: Run, finite: bool) -> bool:
        """Make ranks that share one model take the step together, or skip it together."""
        if run.comm.size == 1 or not run.exchange.alike:
            return finite
        wrong = np.array([not finite], np.int64)
        run.comm.wait([run.comm.iallreduce(wrong)], "whether losses are finite")
        return not wrong[0]

    @staticmethod
    def _error(run: Run, step: int) -> DlioError:
        wrong = [
            name
            for name, parameter in run.model.named_parameters()
            if parameter.grad is not None and not parameter.grad.isfinite().all()
        ]
        more = ", ..." if len(wrong) > _NAMED else ""
        of = f" (gradients of {', '.join(wrong[:_NAMED])}{more})" if wrong else ""
        samples = ", ".join(map(str, run.loader.last_samples[:8].tolist()))
        loss = float(run.last_loss)
        return DlioError(
            f"rank {run.comm.rank}, epoch {run.epoch_number + 1}, step {step + 1} of the "
            f"optimizer: the loss is {loss:g} or a gradient is not finite{of}; samples "
            f"{samples}, ...; try a smaller --lr, --clip 1, or --nan skip, which skips such steps"
        )
