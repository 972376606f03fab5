"""An exponential moving average of the weights (`--ema`)."""
