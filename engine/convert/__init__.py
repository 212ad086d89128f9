"""From a published checkpoint to one that fits: read, map, quantise, prune, write, and measure the loss.

Owns every step between somebody else's weights and a fermion checkpoint directory. Nothing in `engine` or
`server` imports it at start-up; the commands load it when they run.
"""
