"""Ways to train on fewer samples, for `--case samples`."""

__all__: list[str] = []
