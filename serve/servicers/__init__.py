"""One module a gRPC service: messages in and out. What they share lies in `serve`."""
