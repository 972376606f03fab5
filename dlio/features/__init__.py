"""Features of training that are separate from the trainer; see `dlio.train.feature_spec`."""
