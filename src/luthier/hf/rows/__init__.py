"""Attention in a packed row: where documents begin, who sees whom, and the fast way on the CPU."""
