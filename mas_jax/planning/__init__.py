"""What a run needs and how fast it can go, before a chip is rented."""
