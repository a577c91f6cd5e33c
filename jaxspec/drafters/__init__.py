"""The kinds of drafters: one module a kind, which composes a network, a format and a training command."""
