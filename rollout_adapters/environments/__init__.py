"""Environments: tasks with executable worlds, registered in one line."""
