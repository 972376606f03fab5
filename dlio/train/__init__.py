"""The trainer: a model, an exchange between ranks, and a loader that feeds them."""
