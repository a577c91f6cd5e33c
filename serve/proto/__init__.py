"""The wire format, and the stubs generated from it (`make proto`)."""
