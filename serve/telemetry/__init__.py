"""What is told of requests and of the engine: metrics, log lines, spans."""
