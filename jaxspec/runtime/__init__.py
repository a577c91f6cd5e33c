"""The seam between host and device: compilation, dispatch, results."""
