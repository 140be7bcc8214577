"""Multienv's envs for other libraries; each module needs the library that it is named after."""


def extra_needed(module: str, extra: str, missing: ImportError) -> ImportError:
    """Return the error for a module whose library is not installed; ``missing`` is what its import raised."""
    return ImportError(f'{module} needs {missing.name}: pip install "multienv-rl[{extra}]"', name=missing.name)
