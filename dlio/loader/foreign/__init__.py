"""Other libraries' data sets and trainers, adapted."""

__all__: list[str] = []
