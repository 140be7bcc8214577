"""The version of multienv, alone in its module: the engine asks for it, and so does whoever builds the package."""

__version__ = "0.2.0"
