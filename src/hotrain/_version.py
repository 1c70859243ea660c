"""The version, for packaging and for the records of a run."""

__version__ = "0.1.0"
