"""Sources, readers and their indexes: where samples come from."""
