"""The machine that a number was measured on, for the scripts beside this one."""

from runtime.machine import describe

__all__ = ["describe"]
