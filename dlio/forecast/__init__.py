"""Forecasts: the planning code of real runs, run for jobs of any size, and what it would cost."""

__all__: list[str] = []
