"""A decoder layer's products for few rows, each with the norm, rotation, gate or sum around it in one kernel."""
