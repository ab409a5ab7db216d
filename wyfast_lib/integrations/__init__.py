"""Adapters for other libraries, called explicitly: nothing is patched."""
