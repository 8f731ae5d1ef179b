"""Measurement of this machine for the planner: kernels and calls on each device, and the links between devices."""
