"""Target model families, as functions over pytrees (device ring: no scheduler, no policy)."""
