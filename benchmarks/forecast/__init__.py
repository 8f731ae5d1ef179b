"""Forecasts beside what was measured: prices on this CPU, published times of one device, and predictions for several.

python -m benchmarks.forecast --write docs/figures/forecast.md              without GPUs and without weights
python -m benchmarks.forecast --cpu --write docs/figures/prices.md          kernels and calls of this CPU, a minute
"""
