"""The services on the wire: jaxspec.v1, administration, health; who may call them and what a request may hold."""
