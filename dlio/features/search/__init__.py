"""Meta-parameter search: many trainings over one staged copy of the data, which survives kills.

    searcher --> zygote: has imported torch; forks the ranks of a trial in milliseconds
        |           |
        |           +--> rank, rank, ...: one trial each, or `ranks_per_trial` of them
        +--> study folder: journal, one folder per trial (checkpoints, log, weights), tiers

| module | idea |
|---|---|
| `search_options` | the options of `dlio search` |
| `search_command` | the command, and one staged copy of the data |
| `search_space` | the parameters of `--set`, and a trial's configuration |
| `successive_halving` | when a trial is stopped early: ASHA and Hyperband, as pure functions |
| `parameter_sampler` | the parameters of the next trial, by Optuna |
| `study`, `study_journal` | the folder: its lock, its trials; its journal |
| `trial` | the program of a trial's rank, and its messages to the searcher |
| `searcher` | starts and ends trials until all are done |
| `search_display` | the table, the page of plots, the summary |

A trial's parameters depend on the seed, its number, and the results of trials that precede it by at
least `--lag`; whether it is stopped, on trials with lower numbers. Neither depends on time, on
ranks, or on kills.
"""
