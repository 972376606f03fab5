"""torch's DataLoader, fed from the hierarchy."""
