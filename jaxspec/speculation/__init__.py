"""Drafting and verification as functions over pytrees (device ring: no scheduler, no policy, no model family)."""
