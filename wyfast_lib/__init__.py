from wyfast_lib.version import __version__

__all__ = ["__version__"]
