"""Forecasts of a job's traffic and time, by running the planning code for jobs of any size."""
