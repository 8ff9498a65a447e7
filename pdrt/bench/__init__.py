"""Measurements that anyone can run again: ratios and differences within one run."""
