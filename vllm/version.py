"""The one place that states the version of the package."""

__version__ = "0.28.0+cpu"
__version_tuple__ = (0, 28, 0, "cpu")
