"""Learning: from recorded traces to new parameters."""
