"""The errors of this project, defined in the package that every other one may import.

A user's fault is a `CampError`; its message names the field, the value and the remedy. Both
subclasses carry one string, so they survive pickling between processes.
"""


class CampError(ValueError):
    """Something the user can put right."""


class RecordError(CampError):
    """A turn, an edit or an episode breaks an invariant of the record."""


class ConfigError(CampError):
    """A setting is unknown, malformed, or cannot work together with another one."""
