"""Triton kernels only: no torch logic lives here, so a kernel reads the same on every host."""
