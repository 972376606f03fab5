"""The trainer: a model, a loader that feeds it, and an exchange between ranks."""
