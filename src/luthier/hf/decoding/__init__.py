"""How texts grow, token by token: caches, a lean loop over layers, and loops compiled for it."""
