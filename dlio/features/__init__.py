"""Features of training that can be left out, one folder each; found by entry point."""
