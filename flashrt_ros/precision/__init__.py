"""Precision tiers: formats, the table that says which site is in which, calibration, and the fidelity gate."""
