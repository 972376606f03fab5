"""Helpers for all packages: units, files, private folders, shared memory, threads, options."""
