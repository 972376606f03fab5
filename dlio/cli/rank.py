"""`python -m dlio.cli.rank`: a rank that the launcher started for `-n`."""

from dlio.cli import guarded
from dlio.cli.ranks import run_as_rank

__all__: list[str] = []

if __name__ == "__main__":
    guarded(run_as_rank)
