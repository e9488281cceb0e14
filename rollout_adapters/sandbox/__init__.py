"""Workspaces with a command line, walled off from the trainer and from each other."""
