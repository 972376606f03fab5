"""The engine that reads data sets of dlio along a plan."""
