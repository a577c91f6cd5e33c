"""One drafter a file, and the draft heads' modules; they see models.base and models.layers, never a family."""
