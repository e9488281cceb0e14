"""The embedded host: engine, trainer and demo on one machine."""
