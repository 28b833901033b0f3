"""Benchmarks: each configuration in a process of its own, one JSON row a run. Nothing in keras_sn imports them."""
