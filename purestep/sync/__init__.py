"""What the ranks of an axis say to each other in an update."""
