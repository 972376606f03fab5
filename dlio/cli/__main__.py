"""`python -m dlio.cli`, which is how ranks are started."""

from dlio.cli import main

if __name__ == "__main__":
    main()
