"""Decode on the CPU in compiled loops (numba); what they cannot serve runs on torch."""
