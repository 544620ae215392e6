"""What flows: points, and the partial aggregates that they become."""
