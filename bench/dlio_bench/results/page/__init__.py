"""The self-contained page of `dlio bench html`."""

__all__: list[str] = []
