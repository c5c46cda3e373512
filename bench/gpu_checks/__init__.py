"""The parts of `gpu_check.py`, by what they look at."""
