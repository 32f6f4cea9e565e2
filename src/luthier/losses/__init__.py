"""Losses: pure functions of log-probabilities, targets and weights; nothing here knows a model. Import its modules by
name; this file imports nothing, so each costs only itself."""
