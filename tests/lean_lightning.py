"""Make Lightning start in a tenth of the time."""

from typing import Any


def leave_out_unused_packages() -> None:
    """Hide packages from torchmetrics that it imports for metrics that no test uses.

    Has an effect before Lightning is imported.
    """
    from lightning_utilities.core.imports import RequirementCache

    met: Any = RequirementCache
    is_met = met.__bool__
    met.__bool__ = lambda cache: (
        not cache.requirement.startswith(("matplotlib", "transformers")) and is_met(cache)
    )
