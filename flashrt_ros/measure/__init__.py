"""Measuring a policy: parity with the official implementation, time, kernels, and distance from the hardware's limits.

What is in this folder knows no model; what concerns one policy is in the folder of its name. Nothing here runs on a
robot: the command line (`flashrt verify`, `bench`, `profile`, `roofline`, `make-checkpoint`) is its only user.
"""
