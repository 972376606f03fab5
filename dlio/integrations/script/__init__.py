"""`dlio run`: run an unmodified single-process training script on many ranks.

While the script runs, parts of torch are replaced: optimizers get an exchange, loaders give each
rank its share of every batch, and only rank 0 prints and saves. See
`dlio.integrations.script.runner`.
"""
