"""Attention of draft-tree tokens over a paged prefix and over the tree itself."""
