"""The words that everybody speaks: limits, cost books, who spends, what a caller may pass."""
