"""JPEGs and crops: decoding, encoding, transforms."""
