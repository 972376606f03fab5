"""`python -m runners MODULE FUNCTION PACKAGE...`: serve one contender."""

import importlib
import sys

from .protocol import serve

if __name__ == "__main__":
    module, function, *packages = sys.argv[1:]
    serve(getattr(importlib.import_module(f"{__package__}.{module}"), function), packages)
