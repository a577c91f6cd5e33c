"""One-off studies behind the figures of docs/: each is a command of a checkout, and no part of the wheel."""
