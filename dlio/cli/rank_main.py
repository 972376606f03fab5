"""`python -m dlio.cli.rank_main`: the program of a rank that the launcher starts for `-n`."""

from dlio.cli.command_line import guarded
from dlio.launch.command_ranks import run_as_rank

if __name__ == "__main__":
    guarded(run_as_rank)
