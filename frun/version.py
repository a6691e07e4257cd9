"""Owns frun's version: apart from the package, which leads to what needs torch."""

__version__ = "0.1.0"
