"""The engine that reads dlio's own data sets along a plan."""
