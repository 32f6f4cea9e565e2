"""What trains by a job's config."""

from luthier.jobs.engines.base import Engine, engine, engines, register_engine

__all__ = ["Engine", "engine", "engines", "register_engine"]
