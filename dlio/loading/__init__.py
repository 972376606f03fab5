"""What the loader is made of: orders of batches, engines that make them, what is told of them."""
