"""What flows: points, partial aggregates, metric definitions."""
