"""Skip samples from which the network no longer learns."""
