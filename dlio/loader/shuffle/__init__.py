"""Samples on their way between ranks."""
