"""Readers: one file a format, found through the entry-point group `dlio.readers`."""
