"""Sums of a few rows over the devices of one host."""
