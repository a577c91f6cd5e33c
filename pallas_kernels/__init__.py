"""Pallas kernels of speculative decoding, for TPUs and NVIDIA GPUs, with their XLA references.

A library of its own: it imports jax and nothing of jaxspec. One folder an operation; the
operation's `api` module is its only entrance.
"""
