"""``python -m multienv``: the command line, see :mod:`multienv.cli`."""

from multienv.cli import app

if __name__ == "__main__":
    app()
