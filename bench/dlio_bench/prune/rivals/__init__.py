"""Other ways to prune a network while it trains, as callbacks of `dlio train`."""
