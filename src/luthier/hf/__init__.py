"""All that knows Transformers. Import its modules by name; this file imports nothing, so each costs only itself."""
