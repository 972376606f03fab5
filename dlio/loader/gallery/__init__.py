"""Pages of samples for eyes, for `dlio view` and `Dataset.show`."""
