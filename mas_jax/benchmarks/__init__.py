"""Comparisons with a pinned peer: the same work, in one run, reported as ratios."""
