"""What fetches a job's data set and model: `python -m luthier.jobs.initializers dataset|model|adapters`."""
