"""Ways to train on fewer samples, for `--case samples`."""
