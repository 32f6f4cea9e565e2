"""Packages of this Python environment, which is also that of nodes that run in no container."""

from __future__ import annotations

from importlib.metadata import distributions


def installed() -> dict[str, str]:
    """Names of all installed packages -> their versions, by name."""
    found = {package.metadata["Name"]: package.version for package in distributions()}
    named = {name: version for name, version in found.items() if name}  # what a broken removal leaves has none
    return dict(sorted(named.items(), key=lambda item: item[0].lower()))
