"""Multienv's envs for other libraries; each module needs the library that it is named after."""


def extra_needed(what: str, extra: str, missing: ImportError) -> ImportError:
    """Return the error for what needs a library that is not installed; ``missing`` is what its import raised."""
    return ImportError(f'{what} needs {missing.name}: pip install "multienv-rl[{extra}]"', name=missing.name)
