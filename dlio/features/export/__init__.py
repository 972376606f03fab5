"""Trained models in the formats of other hardware: ONNX, and NIR for neuromorphic chips."""
