"""Tree rejection sampling: from target logits to the accepted path and the token after it, in one launch."""
