"""Other libraries' data sets and trainers, adapted."""
