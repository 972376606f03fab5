"""`python -m dlio.cli.rank`: the program of a rank that the launcher starts for `-n`."""

from dlio.cli import guarded
from dlio.cli.ranks import run_as_rank

if __name__ == "__main__":
    guarded(run_as_rank)
