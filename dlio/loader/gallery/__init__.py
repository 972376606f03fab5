"""Pages of samples for eyes, for `dlio view` and `Dataset.show`."""

__all__: list[str] = []
