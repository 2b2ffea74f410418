"""Answers and behaviour into numbers: pure functions on strings and records, no models."""
