"""torch's DataLoader, fed from the hierarchy."""

__all__: list[str] = []
