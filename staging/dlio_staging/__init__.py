"""The staging tool: `dlio pack`, `dlio stage`, `dlio verify`."""

__all__: list[str] = []
