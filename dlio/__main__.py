"""`python -m dlio`, which is the command `dlio`."""

from dlio.cli import main

if __name__ == "__main__":
    main()
