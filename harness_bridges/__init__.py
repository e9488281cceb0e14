"""Harness bridges: run or observe a harness and record every model call token-exactly."""

from harness_bridges.branches import Branch, Survivors, branches, episode_tape, survivors
from harness_bridges.errors import CampError, ConfigError, RecordError
from harness_bridges.record import Edit, Episode, Turn
from harness_bridges.recover import build_tape
from harness_bridges.store import TornLineWarning, append_episode, read_episodes
from harness_bridges.tape import Tape

__all__ = [
    "Branch",
    "CampError",
    "ConfigError",
    "Edit",
    "Episode",
    "RecordError",
    "Survivors",
    "Tape",
    "TornLineWarning",
    "Turn",
    "append_episode",
    "branches",
    "build_tape",
    "episode_tape",
    "read_episodes",
    "survivors",
]
