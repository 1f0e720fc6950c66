"""Measured calibration of the methods that work across the steps of a chunk, and what the measurements show."""
