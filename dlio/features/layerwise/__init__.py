"""Layers that are trained one after another (`--layerwise`)."""
