"""JPEGs and crops: decoding, encoding, transforms."""

__all__: list[str] = []
