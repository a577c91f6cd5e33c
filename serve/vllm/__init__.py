"""vLLM's engine protocol, which puts gateways made for vLLM in front of this server. Needs the extra "smg"."""
