"""Fixed questions into records, statistics and tables; models and indices are injected."""
