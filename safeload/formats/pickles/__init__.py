"""The pickle gate: a symbolic machine that never imports, calls or builds what a file asks for."""

from safeload.formats.pickles.machine import parse_pickle

__all__ = ["parse_pickle"]
