"""Measuring π0.5: a checkpoint to measure with, the official implementation, a plain one, and what the stages cost."""
