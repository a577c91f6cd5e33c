"""The generation server: gRPC in front of the engine. Imports jaxspec; nothing of jaxspec imports it."""
