"""Which rank gets which batch of an epoch, also after ranks are lost or join."""
