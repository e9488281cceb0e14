"""Rollout adapters: engine client, episodes to samples, rewards, environments."""
