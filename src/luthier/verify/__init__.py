"""The proof, model by model: what a layout computes beside what plain Transformers computes in one process."""
